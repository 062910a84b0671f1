"""A full disk is found before the first byte, or reported at the write that hit it; nothing is left behind either way."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

import pytest
from store_cases import fill_store, make_store, odd_layouts, on_nvme

from infinity.aio.engine import Engine
from infinity.errors import StorageError, SwapSpaceError
from infinity.memory.ledger import Ledger
from infinity.states import Tier
from infinity.store.layout import ParameterSpec, shard_layout
from infinity.store.shares import ShardShares
from infinity.store.swap_file import create_swap_file, require_space

MIB = 1 << 20
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2


def big_shards(num_elements: int) -> list[tuple[object, ShardShares]]:
    layout = shard_layout(0, "big", [ParameterSpec("p", (num_elements,), "float32", True)], tile_elements=1 << 14)
    return [(layout, ShardShares(Tier.CPU, Tier.CPU, frozenset()))]


def punch_holes(path: Path) -> None:
    """Give the blocks of a file back, as a copy-on-write file system may."""
    fd = os.open(path, os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    length = ctypes.c_int64(os.fstat(fd).st_size)
    if libc.fallocate(fd, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, ctypes.c_int64(0), length) != 0:
        pytest.skip("this file system punches no holes")
    os.close(fd)


def fill_up(directory: Path) -> Path:
    """Fill the file system to the last page."""
    path = directory / "other-data"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(directory).f_bavail == 0
    return path


def test_too_small_a_disk_is_refused_with_needed_and_free_bytes(small_disk: Path, threads_engine: Engine) -> None:
    """6 MiB do not go on 4 MiB; no directory, lock or file is made, and no memory stays booked."""
    ledger = Ledger({})
    with pytest.raises(
        SwapSpaceError, match=rf"{small_disk}: {6 * MIB} bytes .6.00 MiB. are needed, \d+ bytes .* free"
    ) as e:
        make_store([small_disk], threads_engine, big_shards(6 * MIB // 8), ledger=ledger)  # type: ignore[arg-type]
    assert e.value.errno == errno.ENOSPC
    assert list(small_disk.iterdir()) == []
    assert ledger.used(Tier.CPU) == 0


def test_two_directories_on_one_disk_share_its_space(small_disk: Path, threads_engine: Engine) -> None:
    """Each half would fit alone; together they do not, and that is known before anything is made."""
    directories = [small_disk / "a", small_disk / "b"]
    with pytest.raises(SwapSpaceError, match=f"{directories[0]} and {directories[1]}: {6 * MIB} bytes"):
        make_store(directories, threads_engine, big_shards(6 * MIB // 8))  # type: ignore[arg-type]
    assert [list(directory.iterdir()) for directory in directories] == [[], []]


def test_a_hundredth_of_the_disk_stays_free(small_disk: Path) -> None:
    """The reserve is part of the sum."""
    facts = os.statvfs(small_disk)
    free, reserve = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize // 100
    require_space([(small_disk, free - reserve)])
    with pytest.raises(SwapSpaceError):
        require_space([(small_disk, free - reserve + 1)])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_refuses_at_the_start_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """statvfs knows no quotas; the reservation does. C31."""

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    path = tmp_path / "swap.bin"
    with pytest.raises(SwapSpaceError, match=rf"{path}: cannot reserve {MIB} bytes.*bytes .* are free in {tmp_path}") as e:
        create_swap_file(path, MIB)
    assert e.value.errno == number
    assert list(tmp_path.iterdir()) == []


def test_the_second_directory_being_full_undoes_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads_engine: Engine
) -> None:
    """A failure half way leaves neither run directories nor files in any of the directories."""
    real, calls = os.posix_fallocate, []

    def refuse_second(fd: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse_second)
    directories = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(SwapSpaceError, match=f"{directories[1]}"):
        make_store(directories, threads_engine, on_nvme(odd_layouts()))
    assert [list(directory.iterdir()) for directory in directories] == [[], []]


def test_swap_blocks_are_reserved_so_that_a_disk_filled_later_does_no_harm(small_disk: Path, engine: Engine) -> None:
    """The rest of the disk is full during the run, and every write still finds its place."""
    shards = on_nvme(odd_layouts())
    store = make_store([small_disk], engine, shards)
    other = fill_up(small_disk)
    fill_store(store, shards)
    store.close()
    assert list(small_disk.iterdir()) == [other]


def test_disk_full_in_mid_run_is_an_error_at_the_write(small_disk: Path, engine: Engine) -> None:
    """Without its reservation a write meets the full disk: file, offset, errno and free space are named. C3."""
    shards = on_nvme(odd_layouts())
    store = make_store([small_disk], engine, shards)
    fill_store(store, shards)
    swap = store.directories[0] / "swap.bin"
    tile = shards[0][0].tiles[0]
    lease = store.fetch_tile(tile).wait()
    punch_holes(swap)
    other = fill_up(small_disk)
    write = store.publish_tile(tile, lease)
    with pytest.raises(
        SwapSpaceError, match=rf"write of \d+ bytes at offset \d+ of {swap} failed: .*errno 28.*0 bytes are free"
    ):
        write.wait()
    with pytest.raises(StorageError, match=f"{swap}"):
        store.fetch_tile(tile)
    store.close()
    assert list(small_disk.iterdir()) == [other]
