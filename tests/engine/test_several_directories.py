"""Training over two directories: the bits of one, shares by rate, a failing one named, resumed whatever the rates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import BULK, TINY_GPT, open_engine, require_same, settings, train, train_engine

import infinity.engine.directories as directories
import infinity.engine.persistence as persistence
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.rates import DirectoryRate, Rate
from infinity.aio.request import Op
from infinity.engine import EngineState
from infinity.engine.in_place import adoption
from infinity.errors import CheckpointIncomplete, ConfigError, StorageError, SwapSpaceError
from infinity.placement import Plan

NVME = {"optim": "nvme", "params": "nvme"}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two directories for swap files, on one device."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return tmp_path / "a", tmp_path / "b"


def rates_of(monkeypatch: pytest.MonkeyPatch, *rates: float) -> None:
    """Let the directories of the engines that follow have these rates."""

    def measured(paths: Sequence[Path], engine: object) -> tuple[DirectoryRate, ...]:
        return tuple(DirectoryRate(path, Rate(rate, rate), rate) for path, rate in zip(paths, rates, strict=True))

    monkeypatch.setattr(directories, "measure_directories", measured)


def over(paths: Sequence[Path], **options: Any) -> dict[str, Any]:
    """Return a configuration with everything on NVMe in these directories."""
    config = settings(paths[0], **{**NVME, **options})
    return {**config, "infinity": {**config["infinity"], "nvme": [str(path) for path in paths]}}


def swap_bytes(paths: Sequence[Path]) -> list[int]:
    return [(path / "infinity-run" / "swap.bin").stat().st_size for path in paths]


@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_two_directories_give_the_bits_of_one(pair: tuple[Path, Path], bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """C147: striped 3 to 1, equally by real measurements, or not at all: the same losses and the same weights."""
    expected = train(TINY_GPT, over(pair[:1], bf16=bf16, num_micro_batches=2))
    require_same(train(TINY_GPT, over(pair, bf16=bf16, num_micro_batches=2)), expected)
    rates_of(monkeypatch, 3e9, 1e9)
    require_same(train(TINY_GPT, over(pair, bf16=bf16, num_micro_batches=2)), expected)
    assert [list(path.iterdir()) for path in pair] == [[], []]


def test_shares_follow_rates_and_the_plan_says_both(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """C147: the swap files are 3 to 1; before they exist the plan names each with bytes, share, device and rates."""
    rates_of(monkeypatch, 3 << 30, 1 << 30)
    shown: list[tuple[Plan, list[list[Path]]]] = []

    def on_plan(plan: Plan) -> None:
        shown.append((plan, [list(path.iterdir()) for path in pair]))

    with open_engine(BULK.build(), over(pair), on_plan=on_plan) as engine:
        sizes = swap_bytes(pair)
        plan = engine.plan
    assert 2.5 < sizes[0] / sizes[1] < 3.5
    [(planned, made)] = shown
    assert made == [[], []]
    assert planned == plan
    assert [line.num_bytes for line in plan.directories] == sizes
    assert sum(sizes) == plan.disk_bytes
    rows = dict(plan.lines())
    for path, share, rate in zip(pair, sizes, ("3.00 GiB/s", "1.00 GiB/s"), strict=True):
        assert f"({share / sum(sizes):.0%})" in rows[f"nvme {path}"]
        assert f"reads {rate}, writes {rate}, shared" in rows[f"nvme {path}"]
    assert plan.nvme_seconds is not None
    # Both are on one device here, so that their times add up.
    moved = plan.nvme_read_bytes + plan.nvme_write_bytes
    by_share = sum(size / sum(sizes) / rate for size, rate in zip(sizes, (3 << 30, 1 << 30), strict=True))
    assert plan.nvme_seconds == pytest.approx(moved * by_share)
    assert plan.to_json()["directories"][1]["directory"] == str(pair[1])  # type: ignore[index]


def test_one_directory_is_not_measured(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing to share out nothing is measured, and the plan claims no rate."""
    monkeypatch.setattr(directories, "measure_directories", None)
    with open_engine(BULK.build(), over([nvme])) as engine:
        [line] = engine.plan.directories
        assert (line.directory, line.num_bytes) == (str(nvme), engine.plan.disk_bytes)
        assert line.read_bytes_per_second is None
        assert engine.plan.nvme_seconds is None


def test_nothing_on_nvme_touches_no_directory(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fits into RAM neither probes nor measures."""
    monkeypatch.setattr(directories, "probe", None)
    monkeypatch.setattr(directories, "measure_directories", None)
    with open_engine(BULK.build(), over(pair, optim="cpu", params="cpu")) as engine:
        assert engine.plan.directories == ()


def test_a_small_directory_takes_what_fits(nvme: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C147: a disk of 8 MiB that is a hundred times as fast takes its room, the other the rest; the bits stay."""
    rates_of(monkeypatch, 100e9, 1e9)
    (small_disk / "other").write_bytes(bytes(7 << 20))
    with open_engine(BULK.build(), over([small_disk, nvme])) as engine:
        sizes = swap_bytes([small_disk, nvme])
        run = train_engine(engine, BULK, over([nvme]), range(2))
    assert 0 < sizes[0] < (8 << 20) - (7 << 20)
    assert sizes[1] > 0
    require_same(run, train(BULK, over([nvme]), num_steps=2))


def test_a_directory_in_memory_takes_what_the_budget_leaves(
    nvme: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tmpfs beside a disk is much faster, but it is RAM: what is beyond the budget goes to the disk."""
    rates_of(monkeypatch, 100e9, 1e9)
    with open_engine(BULK.build(), over([nvme])) as engine:
        planned_bytes = sum(line.num_bytes for line in engine.plan.memory)
    spare_bytes = 300 << 10
    with open_engine(BULK.build(), over([small_disk, nvme], cpu_memory=planned_bytes + spare_bytes)) as engine:
        in_memory, on_disk = swap_bytes([small_disk, nvme])
    assert spare_bytes - (64 << 10) < in_memory <= spare_bytes
    assert on_disk > in_memory


@pytest.mark.parametrize("op", list(Op))
def test_a_failing_directory_is_named_and_ends_the_run(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, op: Op
) -> None:
    """C147: the error says which of the two it was, that the other is fine, and how to go on; the engine is FAILED."""
    failing: list[bool] = [False]
    fault = Fault(FaultKind.ERROR, lambda request: failing[0] and request.op is op and pair[1] in request.file.path.parents)
    real = directories.open_engine
    monkeypatch.setattr(directories, "open_engine", lambda *args, **kwargs: FaultyEngine(real(*args, **kwargs), [fault]))
    engine = open_engine(BULK.build(), over(pair))
    engine.train_batch(BULK.batches(0, 1, torch.bfloat16))
    engine.synchronize()
    failing[0] = True

    def go_on() -> None:
        for step in (1, 2):
            engine.train_batch(BULK.batches(step, 1, torch.bfloat16))
            engine.synchronize()

    with pytest.raises(StorageError) as caught:
        go_on()
    said = str(caught.value)
    assert said.startswith(f"NVMe directory {pair[1]} (")
    assert f"Nothing has failed in {pair[0]}." in said
    assert f"from the last checkpoint, without --nvme {pair[1]}" in said
    assert engine.state is EngineState.FAILED
    engine.close()
    assert [list(path.iterdir()) for path in pair] == [[], []]


def test_one_directory_twice_is_refused(nvme: Path) -> None:
    """A link to the first directory: an error that names both, before anything is made in either."""
    link = nvme.with_name("link")
    link.symlink_to(nvme)
    with pytest.raises(ConfigError, match=f"{nvme} and {link} are one and the same"):
        open_engine(BULK.build(), over([nvme, link]))
    assert list(nvme.iterdir()) == []


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of a checkpoint fits."""

    def refuse(*_: object, **__: object) -> Path:
        raise SwapSpaceError("no room for a copy")

    monkeypatch.setattr(persistence, "write_checkpoint", refuse)


@pytest.mark.usefixtures("no_room")
def test_a_commit_in_place_is_resumed_whatever_the_rates_are_then(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Committed with 3 to 1, resumed when the directories do 1 to 5: the files are taken as they are, bit for bit."""
    expected = train(BULK, over(pair[:1]), num_steps=4)
    rates_of(monkeypatch, 3e9, 1e9)
    with open_engine(BULK.build(), over(pair)) as engine:
        train_engine(engine, BULK, over(pair), range(2))
        path = engine.save_checkpoint(tmp_path / "checkpoints")
        sizes = swap_bytes(pair)
    assert swap_bytes(pair) == sizes
    rates_of(monkeypatch, 1e9, 5e9)
    with open_engine(BULK.build(), over(pair), adopt=path) as engine:
        engine.load_checkpoint(path)
        assert [line.num_bytes for line in engine.plan.directories] == sizes
        run = train_engine(engine, BULK, over(pair), (2, 3))
    assert run.losses == expected.losses[2:]
    assert all(torch.equal(value, expected.state[name]) for name, value in run.state.items())


def _agree_with_lengths(manifest: Path) -> None:
    """Let a manifest name the lengths that its files have now: whether two commits differ in theirs is chance."""
    content = json.loads(manifest.read_text())
    for record in content["files"]:
        if record["header_crc32"] is None:
            record["num_bytes"] = Path(record["path"]).stat().st_size
    manifest.write_text(json.dumps(content))


@pytest.mark.usefixtures("no_room")
def test_a_checkpoint_whose_swap_files_hold_a_later_one_is_told(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Two commits leave files of equal names and lengths: the earlier checkpoint is not taken for the later one."""
    with open_engine(BULK.build(), over(pair)) as engine:
        paths = []
        for step in range(2):
            train_engine(engine, BULK, over(pair), [step])
            paths.append(engine.save_checkpoint(tmp_path / "checkpoints"))
    _agree_with_lengths(paths[0] / "manifest.json")
    with pytest.raises(CheckpointIncomplete, match=f"{paths[0]} is gone.*the checkpoint of step 2 now"):
        adoption(paths[0], num_ranks=1)
    found = adoption(paths[1], num_ranks=1)
    assert found is not None
    assert found.state.counters.global_step == 2
