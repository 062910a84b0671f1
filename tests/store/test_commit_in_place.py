"""A checkpoint in place: committed, adopted by a later run, destroyed by the first write, and never half there."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_cases import (
    LazyEngine,
    assert_same_bytes,
    fill,
    fill_store,
    in_memory,
    make_store,
    mixed,
    odd_layouts,
    on_nvme,
    page_buffer,
    read_store,
)

from infinity.aio.engine import Engine
from infinity.aio.request import Request
from infinity.aio.select import open_engine
from infinity.errors import CheckpointIncomplete, CheckpointMismatch, IllegalTransition, StorageError, SwapSpaceError
from infinity.handles import Handle
from infinity.memory.ledger import Ledger
from infinity.states import Tier
from infinity.store.commit import read_commit
from infinity.store.directory import RunState, list_runs, remove_dead_runs
from infinity.store.layout import ParameterSpec, shard_layout
from infinity.store.shares import ShardShares
from infinity.store.swap_file import require_space

MANIFEST = {"step": 12, "random": [1, 2, 3]}


@pytest.mark.parametrize("place", [on_nvme, mixed])
@pytest.mark.parametrize("num_directories", [1, 2])
def test_an_adopted_store_has_every_committed_byte(
    tmp_path: Path, engine: Engine, place: object, num_directories: int
) -> None:
    """Swapped and resident state, over one or two directories, come back with manifest and shares."""
    directories = [tmp_path / f"disk{number}" for number in range(num_directories)]
    shards = place(odd_layouts())  # type: ignore[operator]
    store = make_store(directories, engine, shards)
    expected = fill_store(store, shards)
    store.commit_in_place(MANIFEST)
    assert_same_bytes(read_store(store, shards), expected)  # reading goes on
    store.close(keep=True)
    for directory in directories:
        assert [run.state for run in list_runs(directory)] == [RunState.COMMITTED]
        assert remove_dead_runs(directory) == ()
    commit = read_commit(directories[-1] / "infinity-test")
    assert (commit.manifest, commit.shares) == (MANIFEST, tuple(shares for _, shares in shards))
    adopted = make_store([], engine, shards, adopt=directories[-1] / "infinity-test")
    assert adopted.directories == tuple(directory / "infinity-test" for directory in directories)
    assert_same_bytes(read_store(adopted, shards), expected)
    adopted.close()
    assert [run.state for directory in directories for run in list_runs(directory)] == [RunState.COMMITTED] * num_directories


def test_a_commit_may_use_what_is_kept_free(small_disk: Path, threads_engine: Engine) -> None:
    """With less free than a new run would have to leave, but enough for what is in RAM, the run is still rescued."""
    layout = shard_layout(0, "small", [ParameterSpec("p", (1 << 12,), "float32", True)], tile_elements=1 << 9)
    shards = [(layout, ShardShares(Tier.NVME, Tier.CPU, frozenset({0})))]
    store = make_store([small_disk], threads_engine, shards)
    expected = fill_store(store, shards)
    facts = os.statvfs(small_disk)
    (small_disk / "other-data").write_bytes(bytes((facts.f_bavail - 8) * facts.f_frsize))
    with pytest.raises(SwapSpaceError, match="are needed"):
        require_space([(small_disk, 4096)])
    store.commit_in_place(MANIFEST)
    store.close(keep=True)
    adopted = make_store([], threads_engine, shards, adopt=small_disk / "infinity-test")
    assert_same_bytes(read_store(adopted, shards), expected)
    adopted.close()


@pytest.mark.parametrize("adopt", [False, True])
def test_the_first_write_takes_the_checkpoint_back(tmp_path: Path, threads_engine: Engine, adopt: bool) -> None:
    """From the first changed byte on committed.json is consumed.json, and close leaves nothing."""
    shards = mixed(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    fill_store(store, shards)
    store.commit_in_place(MANIFEST)
    run = tmp_path / "infinity-test"
    if adopt:
        store.close(keep=True)
        store = make_store([], threads_engine, shards, adopt=run)
    resident = shards[0][0].tiles[1]
    store.publish_tile(resident, store.new_tile(resident)).wait()
    gradient = page_buffer(shards[1][0].grad_bytes(2))
    store.publish_gradients(1, gradient).wait()
    assert (run / "committed.json").exists()  # neither RAM nor gradients are in the files that it covers
    source = page_buffer(shards[0][0].shard_weight_bytes)
    store.publish_weights(0, source).wait()
    assert sorted(path.name for path in run.iterdir()) == ["consumed.json", "lock", "owner.json", "swap.bin"]
    with pytest.raises(CheckpointIncomplete, match=r"no committed\.json"):
        read_commit(run)
    store.close(keep=True)
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_committed_again_and_again(tmp_path: Path, threads_engine: Engine) -> None:
    """Commit, train, commit: the last one counts, also when nothing was written between two."""
    shards = mixed(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    for seed in range(2):
        expected = fill_store(store, shards, seed)
        store.commit_in_place({"step": seed})
    store.commit_in_place({"step": 7})
    store.close(keep=True)
    run = tmp_path / "infinity-test"
    assert read_commit(run).manifest == {"step": 7}
    adopted = make_store([], threads_engine, shards, adopt=run)
    assert_same_bytes(read_store(adopted, shards), expected)
    expected = fill_store(adopted, shards, 5)
    adopted.commit_in_place({"step": 8})
    adopted.close(keep=True)
    again = make_store([], threads_engine, shards, adopt=run)
    assert_same_bytes(read_store(again, shards), expected)
    assert json.loads((run / "owner.json").read_text())["state"] == "adopted"
    again.close()


def test_a_commit_that_is_not_kept_is_removed(tmp_path: Path, threads_engine: Engine) -> None:
    """A run that ends well and needs its own checkpoint no more leaves nothing."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    fill_store(store, shards)
    store.commit_in_place(MANIFEST)
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_another_model_or_placement_is_refused_and_the_checkpoint_stays(tmp_path: Path, threads_engine: Engine) -> None:
    """Tile size, dtype and shares must be those of the commit; a refusal harms nothing."""
    shards = mixed(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    expected = fill_store(store, shards)
    store.commit_in_place(MANIFEST)
    store.close(keep=True)
    run, ledger = tmp_path / "infinity-test", Ledger({})
    other = [(shard_layout(0, "unit0", [ParameterSpec("p", (9,), "float32", True)], tile_elements=64), shards[0][1])]
    for wrong in (on_nvme(odd_layouts()), other):
        with pytest.raises(CheckpointMismatch, match="another model, precision, tile size or placement"):
            make_store([], threads_engine, wrong, adopt=run, ledger=ledger)
    assert ledger.used(Tier.CPU) == 0
    adopted = make_store([], threads_engine, shards, adopt=run)
    assert_same_bytes(read_store(adopted, shards), expected)
    with pytest.raises(StorageError, match="in use"):
        make_store([], threads_engine, shards, adopt=run)
    adopted.close()


@pytest.mark.parametrize("damage", ["missing", "short", "resident", "garbage", "format", "other"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, threads_engine: Engine, damage: str) -> None:
    """A missing or short file, unreadable JSON, another format, or directories of two checkpoints: never adopted."""
    shards = mixed(odd_layouts())
    directories = [tmp_path / "a", tmp_path / "b"]
    store = make_store(directories, threads_engine, shards)
    fill_store(store, shards)
    store.commit_in_place(MANIFEST)
    store.close(keep=True)
    first, second = (directory / "infinity-test" for directory in directories)
    committed = first / "committed.json"
    if damage == "missing":
        (second / "swap.bin").unlink()
    elif damage == "short":
        os.truncate(second / "swap.bin", 4096)
    elif damage == "resident":
        (first / "resident.bin").unlink()
    elif damage == "garbage":
        committed.write_text(committed.read_text()[:-9])
    elif damage == "format":
        committed.write_text(committed.read_text().replace("infinity-commit/", "infinity-commit/9"))
    else:
        committed.write_text(committed.read_text().replace(read_commit(first).commit_id, "0" * 32))
    with pytest.raises(CheckpointMismatch if damage == "format" else CheckpointIncomplete):
        make_store([], threads_engine, shards, adopt=first)
    assert committed.exists()


def test_no_room_for_the_resident_part_is_said_and_leaves_no_half(small_disk: Path, threads_engine: Engine) -> None:
    """resident.bin does not fit: SwapSpaceError, no committed.json, no resident.bin, and training may go on."""
    layout = shard_layout(0, "big", [ParameterSpec("p", (3 << 17,), "float32", True)], tile_elements=1 << 14)
    shards = [(layout, ShardShares(Tier.CPU, Tier.CPU, frozenset(range(len(layout.tiles) // 2))))]
    store = make_store([small_disk], threads_engine, shards)
    expected = fill_store(store, shards)
    with pytest.raises(SwapSpaceError, match=f"{small_disk}.*cannot reserve {3 << 20} bytes"):
        store.commit_in_place(MANIFEST)
    assert sorted(path.name for path in store.directories[0].iterdir()) == ["lock", "owner.json", "swap.bin"]
    assert_same_bytes(read_store(store, shards), expected)
    store.close(keep=True)
    assert list(small_disk.iterdir()) == []


def test_a_manifest_that_cannot_be_written_everywhere_counts_nowhere(
    tmp_path: Path, threads_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two manifests meets a full disk: neither directory is a checkpoint, and the run goes on."""
    shards = mixed(odd_layouts())
    directories = [tmp_path / "a", tmp_path / "b"]
    store = make_store(directories, threads_engine, shards)
    expected = fill_store(store, shards)
    real = os.replace

    def refuse_first_directory(source: Path, target: Path) -> None:
        if Path(target) == store.directories[0] / "committed.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse_first_directory)
    with pytest.raises(StorageError, match=f"Cannot commit the checkpoint in {store.directories[0]}: No space left"):
        store.commit_in_place(MANIFEST)
    left = {path.name for directory in store.directories for path in directory.iterdir()}
    assert left == {"consumed.json", "lock", "owner.json", "swap.bin"}
    assert_same_bytes(read_store(store, shards), expected)
    store.close(keep=True)
    assert [list(directory.iterdir()) for directory in directories] == [[], []]


def test_what_cannot_be_committed_says_so(tmp_path: Path, threads_engine: Engine) -> None:
    """A tile in somebody's hands, a tile never filled, weights never published, no directory at all."""
    shards = on_nvme(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    with pytest.raises(IllegalTransition, match="tile 0 of unit0 is EMPTY"):
        store.commit_in_place(MANIFEST)
    fill_store(store, shards)
    lease = store.fetch_tile(shards[0][0].tiles[0]).wait()
    with pytest.raises(IllegalTransition, match="tile 0 of unit0 is RESIDENT"):
        store.commit_in_place(MANIFEST)
    lease.release()
    store.commit_in_place(MANIFEST)
    store.close()
    frozen = [(layout, ShardShares(Tier.NVME, Tier.CPU, frozenset())) for layout in odd_layouts()[3:]]
    store = make_store([tmp_path], threads_engine, frozen)
    with pytest.raises(IllegalTransition, match="weights of unit3 were never published"):
        store.commit_in_place(MANIFEST)
    store.close()
    store = make_store([tmp_path], threads_engine, in_memory(odd_layouts()))
    with pytest.raises(StorageError, match="Nothing of this run is on NVMe"):
        store.commit_in_place(MANIFEST)
    store.close()


def test_the_description_covers_every_weight_and_tile(tmp_path: Path, threads_engine: Engine) -> None:
    """describe() is JSON and names file, directory, offset and length of everything."""
    shards = mixed(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    described = json.loads(json.dumps(store.describe()))
    assert [shard["name"] for shard in described["shards"]] == [layout.name for layout, _ in shards]
    for (layout, shares), shard in zip(shards, described["shards"], strict=True):
        assert shard["weights"]["length"] == layout.shard_weight_bytes
        assert shard["weights"]["file"] == ("swap.bin" if shares.params is Tier.NVME else "resident.bin")
        assert [tile["length"] for tile in shard["tiles"]] == [tile.extent_bytes for tile in layout.tiles]
    store.close()


def test_weights_that_are_filled_but_not_published_are_resident(tmp_path: Path, threads_engine: Engine) -> None:
    """Resident weights are committed as they are in the buffer at that moment."""
    shards = mixed(odd_layouts())
    store = make_store([tmp_path], threads_engine, shards)
    expected = fill_store(store, shards)
    weights = store.weights(1)
    assert weights is not None
    expected[1] = fill(weights, 123)
    store.commit_in_place(MANIFEST)
    store.close(keep=True)
    adopted = make_store([], threads_engine, shards, adopt=tmp_path / "infinity-test")
    assert_same_bytes(read_store(adopted, shards), expected)
    adopted.close()


def test_a_checkpoint_that_is_taken_back_frees_its_space(tmp_path: Path) -> None:
    """The buffered engine opens files of its own: none of resident.bin stays, or its space would when it is removed."""
    engine = open_engine("buffered", queue_depth=4, block_bytes=1 << 16)
    shards = mixed(odd_layouts())
    store = make_store([tmp_path], engine, shards)
    fill_store(store, shards)
    store.commit_in_place(MANIFEST)
    store.close(keep=True)
    assert _num_open(tmp_path) == 0
    adopted = make_store([], engine, shards, adopt=tmp_path / "infinity-test")
    assert _num_open(tmp_path, "resident.bin") == 0
    adopted.close()
    engine.close()


def test_an_interrupted_commit_leaves_no_request_behind(
    tmp_path: Path, threads_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while resident.bin is written: its number is soon another file's, so every write to it is over by then."""
    engine, shards = LazyEngine(threads_engine), mixed(odd_layouts())
    store = make_store([tmp_path], engine, shards)
    fill_store(store, shards)
    asked: list[Request] = []
    submit, perform = engine.submit, engine.perform

    def remembered(requests: Sequence[Request]) -> list[Handle[None]]:
        asked.extend(requests)
        return submit(requests)

    def interrupted(request: Request) -> None:
        monkeypatch.setattr(engine, "perform", perform)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "submit", remembered)
    monkeypatch.setattr(engine, "perform", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.commit_in_place(MANIFEST)
    done = [request for request in engine.done if request.file.path.name == "resident.bin"]
    assert len(done) == len(asked) - 1 > 0  # all but the one whose wait was interrupted
    store.close()


def _num_open(directory: Path, name: str = "") -> int:
    """How many descriptors of this process are on files below the directory, removed ones too."""
    links = [
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    return sum(link.startswith(f"{directory}/") and name in link for link in links)
