"""Each rank has its part of the state; together they read it whole, save it and load it, over threads with gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from parts_of_ranks import Rank, checkpoint_state, layouts, master_of, open_rank, own_part, require_split, state_of

from infinity.checkpoint.reader import open_checkpoint
from infinity.checkpoint.sources import HostData, UnitSource
from infinity.checkpoint.writer import write_checkpoint
from infinity.comm.group import Group
from infinity.comm.local import Local
from infinity.engine.planes import part_of, read_plane, section_of
from infinity.engine.save_together import write_together
from infinity.engine.shard_sources import ShardSource, load_shard
from infinity.errors import CommError, StorageError, SwapSpaceError
from infinity.store.layout import shard_layout

sys.path.insert(0, str(Path(__file__).parents[1] / "comm"))
from parts_of_ranks import page_buffer
from rank_threads import on_every_rank, open_threads

DTYPES = ("bfloat16", "float16", "float32")


def on_ranks(size: int, job: Callable[[Group], Any]) -> list[Any]:
    """Run a job on every rank of a fresh group and return what each gave or raised."""
    groups: list[Group] = [Local()] if size == 1 else open_threads(size)
    results = on_every_rank(size, lambda rank: job(groups[rank]))
    ended = on_every_rank(size, lambda rank: groups[rank].close())
    assert ended == [None] * size or any(isinstance(result, BaseException) for result in results)
    return results


def require_none(results: list[Any]) -> None:
    """Raise the first error of a rank; fail where a rank gave anything."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert results == [None] * len(results)


def save(rank: Rank, directory: Path, step: int, *, sources: list[UnitSource] | None = None) -> Path:
    return write_together(
        rank.exchange.group,
        sources or rank.sources,
        lambda units: write_checkpoint(directory, units, checkpoint_state(step)),
        what=f"step {step}",
    )


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_ranks_save_loads_on_any_number_of_them(dtype: str, tmp_path: Path) -> None:
    """C4, C13: saved on 2 ranks, with tiles over edges and parameters smaller than the ranks, loaded on 1, 3 and 4."""
    state, other = state_of(dtype, 1), state_of(dtype, 2)

    def saving(group: Group) -> None:
        with ExitStack() as opened:
            rank = open_rank(group, dtype, state, tmp_path, opened)
            require_split(rank, 2)
            assert save(rank, tmp_path / "saved", 3) == tmp_path / "saved" / "step-00000003"
            assert rank.weights.num_held == 0
            assert rank.different(state) == []

    require_none(on_ranks(2, saving))
    for size, split, nvme in ((1, True, None), (3, True, tmp_path), (4, True, None), (2, False, tmp_path)):

        def loading(group: Group, split: bool = split, nvme: Path | None = nvme) -> None:
            with ExitStack() as opened:
                rank = open_rank(group, dtype, other, nvme, opened, split=split)
                assert rank.different(state) != []
                with open_checkpoint(tmp_path / "saved") as checkpoint:
                    for layout in rank.layouts:
                        load_shard(checkpoint, layout, rank.store, page_buffer(layout.shard_weight_bytes))
                assert rank.different(state) == []

        require_none(on_ranks(size, loading))


@pytest.mark.parametrize(("size", "split"), [(1, True), (3, True), (2, False)], ids=["one", "three", "stage 0"])
def test_the_file_is_the_same_from_any_number_of_ranks(size: int, split: bool, tmp_path: Path) -> None:
    """One format: what one rank writes of a unit and what three write together is equal byte for byte."""
    state = state_of("bfloat16", 1)

    def saving(group: Group, directory: Path, split: bool) -> None:
        with ExitStack() as opened:
            save(open_rank(group, "bfloat16", state, None, opened, split=split), directory, 1)

    require_none(on_ranks(1, lambda group: saving(group, tmp_path / "one", True)))
    require_none(on_ranks(size, lambda group: saving(group, tmp_path / "several", split)))
    for number in range(3):
        name = f"step-00000001/units/{number:05d}.safetensors"
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "several" / name).read_bytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_and_planes_are_whole_on_every_rank(dtype: str, tmp_path: Path) -> None:
    """Every rank reads every element of a master and a moment; its own part without asking another rank."""
    state = state_of(dtype, 1)

    def reading(group: Group) -> None:
        with ExitStack() as opened:
            rank = open_rank(group, dtype, state, tmp_path if group.rank else None, opened)
            for layout in rank.layouts:
                for spec in layout.specs:
                    master = master_of(state, spec)
                    assert torch.equal(rank.masters.whole(rank.shard(layout), spec), master)
                    for plane in section_of(layout, spec.name).planes:
                        own = read_plane(rank.store, layout, spec.name, plane.name)
                        whole = rank.exchange.whole(layout, spec.name, own, what=plane.name)
                        assert torch.equal(whole, state[plane.name, spec.name].reshape(-1))
            if group.rank == 1:  # alone
                for layout in rank.layouts:
                    for spec in layout.specs:
                        expected = own_part(layout, {("master", spec.name): master_of(state, spec)}, "master", spec.name)
                        assert torch.equal(rank.masters.own(rank.shard(layout), spec), expected)

    require_none(on_ranks(3, reading))


class FailingSource:
    """A unit of which one rank cannot give a piece."""

    def __init__(self, source: ShardSource, error: Exception) -> None:
        self._source = source
        self._error = error
        self.name = source.name
        self.specs = source.specs

    def pieces(self) -> Iterator[tuple[str, int, HostData]]:
        pieces = iter(self._source.pieces())
        yield next(pieces)
        raise self._error


def test_a_full_disk_of_rank_0_is_the_error_of_all_and_they_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C107 over ranks: in the middle of a unit; the checkpoint before is whole, and the next save works."""
    state, original = state_of("bfloat16", 1), os.pwrite

    def saving(group: Group) -> str:
        with ExitStack() as opened:
            rank = open_rank(group, "bfloat16", state, None, opened)
            save(rank, tmp_path, 1)
            if group.rank == 0:
                calls = []

                def full(fd: int, data: memoryview, offset: int) -> int:
                    calls.append(offset)
                    if len(calls) == 6:
                        raise OSError(28, os.strerror(28))
                    return original(fd, data, offset)

                monkeypatch.setattr(os, "pwrite", full)
            try:
                save(rank, tmp_path, 2)
            except SwapSpaceError as error:
                message = error.message
            group.gather(None, what="both have seen it")
            monkeypatch.setattr(os, "pwrite", original)
            assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
            group.gather(None, what="both have looked")
            save(rank, tmp_path, 3)
            assert rank.different(state) == []
            return message

    first, second = on_ranks(2, saving)
    assert isinstance(first, str), first
    assert "Writing" in first
    assert second == f"Rank 0: {first}"
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.state.counters.global_step == 3


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_give_its_part_ends_the_others_wait(broken: int, tmp_path: Path) -> None:
    """C131: a read error on one rank during the save: it raises that, the others a CommError that quotes it, at once."""
    state = state_of("bfloat16", 1)

    def saving(group: Group) -> None:
        with ExitStack() as opened:
            rank = open_rank(group, "bfloat16", state, None, opened)
            save(rank, tmp_path, 1)
            sources: list[UnitSource] = list(rank.sources)
            if group.rank == broken:
                sources[1] = FailingSource(rank.sources[1], StorageError("the medium is worn out"))  # type: ignore[assignment]
            save(rank, tmp_path, 2, sources=sources)

    results = on_ranks(2, saving)
    assert isinstance(results[broken], StorageError)
    assert isinstance(results[1 - broken], CommError)
    assert "worn out" in str(results[1 - broken])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("tile_elements", [64, 128, 4096])
def test_another_ranks_part_follows_from_ones_own(size: int, tile_elements: int) -> None:
    """Sections, runs and tiles of any rank, from the layout of any other."""
    for specs in (layout.specs for layout in layouts("bfloat16", 1, 0, split=True)):
        parts = [
            shard_layout(4, "unit", specs, tile_elements=tile_elements, world_size=size, rank=rank) for rank in range(size)
        ]
        assert all(part_of(mine, rank) == parts[rank] for mine in parts for rank in range(size))
