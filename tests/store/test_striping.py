"""Several directories: bytes follow weights as far as there is room, nothing overlaps, and a commit keeps its table."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_cases import assert_same_bytes, fill_store, make_store, mixed, odd_layouts, on_nvme, read_store
from test_extents_never_overlap import any_shards, assert_fills_the_files

from infinity.aio.engine import Engine
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.request import Op
from infinity.errors import CheckpointIncomplete, ConfigError, StorageError, SwapSpaceError
from infinity.states import Tier
from infinity.store import swap_file
from infinity.store.commit import read_commit
from infinity.store.extents import Extent, ExtentTable, Shards, plan_extents
from infinity.store.layout import ParameterSpec, ShardLayout, shard_layout
from infinity.store.shares import ShardShares
from infinity.store.stripes import Stripe, share_out
from infinity.store.swap_file import require_space, stripes_with_room

PAGE = 4096

weights = st.floats(0.01, 100.0)
any_stripes = st.lists(
    st.builds(Stripe, weights, st.one_of(st.none(), st.integers(0, 1 << 30))), min_size=1, max_size=5
)  # fmt: skip


def big_shards(num_bytes: int) -> list[tuple[ShardLayout, ShardShares]]:
    """Tiles of 12 KiB, in all about `num_bytes`, on NVMe; nothing else there."""
    layout = shard_layout(
        0, "unit", [ParameterSpec("p", (num_bytes // 12,), "bfloat16", True)], tile_elements=1024
    )  # fmt: skip
    return [(layout, ShardShares(Tier.CPU, Tier.CPU, frozenset()))]


@given(st.integers(0, 1 << 31), any_stripes)
@settings(max_examples=200, deadline=None)
def test_shares_keep_to_weights_and_limits(num_bytes: int, stripes: list[Stripe]) -> None:
    """They add up to 1, none is over its limit where the limits allow that, and those below theirs are as their weights."""
    shares = share_out(num_bytes, stripes)
    limits = [float("inf") if stripe.limit_bytes is None else stripe.limit_bytes for stripe in stripes]
    assert sum(shares) == pytest.approx(1.0)
    if sum(limits) < num_bytes:
        return
    taken = [share * num_bytes for share in shares]
    assert all(have <= limit * (1 + 1e-9) + 1e-6 for have, limit in zip(taken, limits, strict=True))
    ratios = [
        share / stripe.weight
        for share, stripe, have, limit in zip(shares, stripes, taken, limits, strict=True)
        if have < limit * (1 - 1e-6) - 1
    ]
    assert not ratios or max(ratios) == pytest.approx(min(ratios), rel=1e-3)


def _kinds(table: ExtentTable) -> Iterator[list[Extent]]:
    yield [shard.weights for shard in table.shards if shard.weights]
    yield [tile for shard in table.shards for tile in shard.tiles if tile]
    yield [shard.gradients for shard in table.shards if shard.gradients]


@given(any_shards(), st.lists(weights, min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_no_directory_is_an_extent_ahead_of_its_share(shards: Shards, given_weights: list[float]) -> None:
    """For weights, tiles and gradients apart, after each extent; of two directories none is an extent behind either."""
    stripes = [Stripe(weight) for weight in given_weights]
    table = plan_extents(shards, grad_element_bytes=2, stripes=stripes)
    assert_fills_the_files(table)
    for extents in _kinds(table):
        fill = [0.0] * len(stripes)
        largest = 0
        for extent in extents:
            fill[extent.file] += extent.num_bytes
            largest = max(largest, extent.num_bytes)
            ahead = [have - sum(fill) * w / sum(given_weights) for have, w in zip(fill, given_weights, strict=True)]
            assert max(ahead) <= largest
            assert len(stripes) > 2 or min(ahead) >= -largest


@given(any_shards(), st.lists(weights, min_size=2, max_size=4), st.integers(0, 3), st.floats(0.0, 1.0))
@settings(max_examples=150, deadline=None)
def test_a_limit_is_kept_and_the_rest_goes_to_the_others(
    shards: Shards, given_weights: list[float], which: int, part: float
) -> None:
    """One directory has room for a part of its share only: it never takes more, and everything is placed all the same."""
    which %= len(given_weights)
    stripes = [Stripe(weight) for weight in given_weights]
    whole = plan_extents(shards, grad_element_bytes=2, stripes=stripes)
    limit = int(whole.file_bytes[which] * part)
    stripes[which] = Stripe(given_weights[which], limit)
    table = plan_extents(shards, grad_element_bytes=2, stripes=stripes)
    assert_fills_the_files(table)
    assert table.file_bytes[which] <= limit
    assert sum(table.file_bytes) == sum(whole.file_bytes)


def test_a_limited_directory_is_used_all_along() -> None:
    """A fast directory with little room takes its few tiles spread over the whole model, not all of the first ones."""
    shards = big_shards(1200 * 1024)
    num_tiles = len(shards[0][0].tiles)
    tile_bytes = shards[0][0].tiles[0].extent_bytes
    table = plan_extents(
        shards, grad_element_bytes=2, stripes=[Stripe(9.0, tile_bytes * num_tiles // 10), Stripe(1.0)]
    )  # fmt: skip
    places = [number for number, extent in enumerate(table.shards[0].tiles) if extent and extent.file == 0]
    assert len(places) == num_tiles // 10
    assert max(places) - min(places) >= num_tiles * 0.8


def test_bytes_are_in_ratio_on_disk_and_come_back(tmp_path: Path, engine: Engine) -> None:
    """C147: rates of 3 to 1 give swap files of 3 to 1 within a tile, and every byte returns."""
    shards = big_shards(1200 * 1024)
    directories = [tmp_path / "a", tmp_path / "b"]
    store = make_store(directories, engine, shards, stripes=[Stripe(3.0), Stripe(1.0)])
    expected = fill_store(store, shards)
    sizes = [(run / "swap.bin").stat().st_size for run in store.directories]
    assert abs(sizes[0] - 3 * sizes[1]) <= 4 * shards[0][0].tiles[0].extent_bytes
    assert_same_bytes(read_store(store, shards), expected)
    store.close()


def test_free_space_bounds_a_share(small_disk: Path, tmp_path: Path, threads_engine: Engine) -> None:
    """C147: a small disk ten times as fast takes what fits, a hundredth left free, and the large one takes the rest."""
    large = tmp_path / "large"
    large.mkdir()
    directories = [small_disk, large]
    stripes = stripes_with_room(directories, [10.0, 1.0])
    facts = os.statvfs(small_disk)
    usable = facts.f_bavail * facts.f_frsize - facts.f_blocks * facts.f_frsize // 100
    assert stripes[0] == Stripe(10.0, usable)
    shards = big_shards(12 << 20)
    store = make_store(directories, threads_engine, shards, stripes=stripes)
    expected = fill_store(store, shards)
    small, rest = ((run / "swap.bin").stat().st_size for run in store.directories)
    assert usable - 2 * shards[0][0].tiles[0].extent_bytes <= small <= usable
    assert small + rest == sum(tile.extent_bytes for tile in shards[0][0].tiles)
    assert_same_bytes(read_store(store, shards), expected)
    store.close()


def test_directories_on_one_disk_have_equal_parts_of_its_room(small_disk: Path) -> None:
    """Neither may count on what the other takes."""
    directories = [small_disk / "a", small_disk / "b"]
    for directory in directories:
        directory.mkdir()
    first, second = stripes_with_room(directories, [3.0, 1.0])
    assert first.limit_bytes == second.limit_bytes == swap_file.usable_bytes(small_disk) // 2
    of_three_ranks, _ = stripes_with_room(directories, [3.0, 1.0], num_sharers=3)
    assert of_three_ranks.limit_bytes == swap_file.usable_bytes(small_disk) // 6


def test_too_little_room_names_the_directory_and_those_with_enough(small_disk: Path, tmp_path: Path) -> None:
    """The error says which directory lacks what, and which one does not."""
    with pytest.raises(SwapSpaceError, match=rf"^{small_disk}: {8 << 20} bytes .* room enough in {tmp_path}\.") as caught:
        require_space([(tmp_path, PAGE), (small_disk, 8 << 20)])
    assert caught.value.errno == errno.ENOSPC


def _link(directory: Path) -> Path:
    link = directory.with_name("link")
    link.symlink_to(directory)
    return link


def _dots(directory: Path) -> Path:
    return directory / ".." / directory.name


@pytest.mark.parametrize("spell", [_link, _dots])
def test_one_directory_in_two_spellings_is_refused(tmp_path: Path, threads_engine: Engine, spell: object) -> None:
    """A link or another way to write it: the error names both, and nothing is made."""
    directory = tmp_path / "disk"
    directory.mkdir()
    other = spell(directory)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=f"{directory} and {other} are one and the same"):
        make_store([directory, other], threads_engine, on_nvme(odd_layouts()))
    assert list(directory.iterdir()) == []


def test_a_bind_mount_is_the_same_directory(tmp_path: Path, small_disk: Path, threads_engine: Engine) -> None:
    """The file system is asked, not the path."""
    point = tmp_path / "bound"
    point.mkdir()
    if subprocess.run(["mount", "--bind", str(small_disk), str(point)], check=False, capture_output=True).returncode != 0:
        pytest.skip("this machine does not let root bind a directory")
    try:
        with pytest.raises(ConfigError, match=f"{small_disk} and {point} are one and the same"):
            make_store([small_disk, point], threads_engine, on_nvme(odd_layouts()))
    finally:
        subprocess.run(["umount", str(point)], check=True)


@pytest.mark.parametrize("op", list(Op))
def test_one_failing_directory_is_named(tmp_path: Path, threads_engine: Engine, op: Op) -> None:
    """C147: the error names the user's directory, its device, the one that is fine, and what can be done."""
    directories = [tmp_path / "good", tmp_path / "bad"]
    failing: list[bool] = [False]
    fault = Fault(
        FaultKind.ERROR, lambda request: failing[0] and request.op is op and directories[1] in request.file.path.parents
    )  # fmt: skip
    shards = big_shards(120 * 1024)
    store = make_store(directories, FaultyEngine(threads_engine, [fault]), shards)
    fill_store(store, shards)
    failing[0] = True
    good, bad = shards[0][0].tiles[:2]
    store.fetch_tile(good).wait().release()
    lease = None if op is Op.READ else store.fetch_tile(bad).wait()
    handle = store.fetch_tile(bad) if lease is None else store.publish_tile(bad, lease)
    with pytest.raises(StorageError) as caught:
        handle.wait()
    said = str(caught.value)
    assert caught.value.errno == errno.EIO
    assert said.startswith(f"NVMe directory {directories[1]} (")
    assert f"{op.value} of " in said
    assert f"Nothing has failed in {directories[0]}." in said
    assert f"go on from the last checkpoint, without --nvme {directories[1]} if it stays broken." in said
    store.close()
    assert [list(directory.iterdir()) for directory in directories] == [[], []]


def test_a_single_failing_directory_is_named_alone(tmp_path: Path, threads_engine: Engine) -> None:
    """With one directory nothing is said of others, nor that one could do without it."""
    fault = Fault(FaultKind.ERROR, lambda request: request.op is Op.READ)
    shards = big_shards(60 * 1024)
    store = make_store([tmp_path], FaultyEngine(threads_engine, [fault]), shards)
    fill_store(store, shards)
    with pytest.raises(StorageError, match=f"^NVMe directory {tmp_path} .*failed: read of") as caught:
        store.fetch_tile(shards[0][0].tiles[0]).wait()
    assert "Nothing has failed" not in str(caught.value)
    assert "--nvme" not in str(caught.value)
    store.close()


def test_a_commit_is_adopted_with_the_weights_that_it_was_written_with(tmp_path: Path, threads_engine: Engine) -> None:
    """Other rates, more room, another order of directories: the table is the commit's, and so is every byte."""
    shards = big_shards(600 * 1024)
    directories = [tmp_path / "a", tmp_path / "b"]
    written = [Stripe(2.7182818284590451, 400 * 1024), Stripe(1.1)]
    store = make_store(directories, threads_engine, shards, stripes=written)
    expected = fill_store(store, shards)
    store.commit_in_place({"step": 3})
    run_paths = store.directories
    store.close(keep=True)
    assert read_commit(run_paths[1]).stripes == tuple(written)
    adopted = make_store(
        directories[::-1], threads_engine, shards, stripes=[Stripe(1.0), Stripe(50.0)], adopt=run_paths[1]
    )  # fmt: skip
    assert adopted.directories == run_paths
    assert_same_bytes(read_store(adopted, shards), expected)
    adopted.commit_in_place({"step": 4})
    adopted.close(keep=True)
    assert read_commit(run_paths[0]).stripes == tuple(written)


def test_swap_files_are_made_once_and_leave_their_blocks_behind(small_disk: Path, threads_engine: Engine) -> None:
    """C153: one file from the first write to the last, commits in between or not; run after run the disk is as before."""
    shards = big_shards(2 << 20)
    before = os.statvfs(small_disk)
    for number in range(3):
        store = make_store([small_disk], threads_engine, shards, run_name=f"run{number}")
        swap = store.directories[0] / "swap.bin"
        made = swap.stat()
        assert made.st_blocks * 512 >= sum(tile.extent_bytes for tile in shards[0][0].tiles)  # reserved before any write
        for seed in range(3):
            fill_store(store, shards, seed)
            store.commit_in_place({"step": seed})
            now = swap.stat()
            assert (now.st_ino, now.st_size, now.st_blocks) == (made.st_ino, made.st_size, made.st_blocks)
        store.close()
        after = os.statvfs(small_disk)
        assert (after.f_bfree, after.f_ffree) == (before.f_bfree, before.f_ffree)
    assert list(small_disk.iterdir()) == []


def test_a_manifest_of_an_earlier_commit_in_another_directory_counts_nowhere(tmp_path: Path, threads_engine: Engine) -> None:
    """A committed.json that is left from an earlier commit in one of the directories is told by its id."""
    shards = big_shards(120 * 1024)
    store = make_store([tmp_path / "a", tmp_path / "b"], threads_engine, shards)
    fill_store(store, shards)
    store.commit_in_place({"step": 1})
    first, second = store.directories
    stale = (second / "committed.json").read_bytes()
    fill_store(store, shards, 1)
    store.commit_in_place({"step": 2})
    store.close(keep=True)
    (second / "committed.json").write_bytes(stale)
    for run in (first, second):
        with pytest.raises(CheckpointIncomplete, match="hold different checkpoints"):
            read_commit(run)


def test_what_lives_in_ram_is_committed_where_there_is_room(
    small_disk: Path, tmp_path: Path, threads_engine: Engine
) -> None:
    """The first directory is full to the brim: resident.bin goes to the second one, is adopted from there, and consumed."""
    shards = mixed(odd_layouts())
    large = tmp_path / "large"
    large.mkdir()
    store = make_store([small_disk, large], threads_engine, shards)
    expected = fill_store(store, shards)
    facts = os.statvfs(small_disk)
    (small_disk / "other-data").write_bytes(bytes((facts.f_bavail - 32) * facts.f_frsize))
    store.commit_in_place({"step": 1})
    store.close(keep=True)
    resident = large / "infinity-test" / "resident.bin"
    assert resident.exists()
    adopted = make_store([], threads_engine, shards, adopt=small_disk / "infinity-test")
    assert_same_bytes(read_store(adopted, shards), expected)
    fill_store(adopted, shards, 1)
    assert not resident.exists()
    adopted.close()
    assert list(large.iterdir()) == []
