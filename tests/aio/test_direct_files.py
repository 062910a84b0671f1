"""Opening files: O_DIRECT where it works, buffered where it is refused, and what the page cache keeps."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from aio_cases import Memory

from infinity.aio.engine import Engine
from infinity.aio.files import DirectFile, open_direct
from infinity.aio.filesystems import free_bytes, memory_filesystem
from infinity.errors import StorageError

PAGE = 4096
SHM = Path("/dev/shm")


def is_direct(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def refuse_at_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no O_DIRECT."""
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "refused")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


def refuse_transfers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make a file system accept O_DIRECT and then fail preadv or pwritev."""
    real = getattr(os, name)

    def refuse(fd: int, buffers: list[object], offset: int) -> int:
        if is_direct(fd):
            raise OSError(errno.EINVAL, "refused")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, name, refuse)


def require_sectors(monkeypatch: pytest.MonkeyPatch, sector_bytes: int) -> None:
    """Make direct transfers fail that are not aligned to larger sectors than this disk has."""
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)

        def move(fd: int, buffers: list[object], offset: int, real: Callable[..., int] = real) -> int:
            view = memoryview(buffers[0]).cast("B")
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            if is_direct(fd) and (offset | len(view) | address) % sector_bytes:
                raise OSError(errno.EINVAL, "refused")
            return real(fd, [view], offset)

        monkeypatch.setattr(os, name, move)


def resident_pages(path: Path) -> int:
    """Return how many of a file's pages are in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE) as view:
        vector = (ctypes.c_ubyte * (-(-size // PAGE)))()
        window = ctypes.c_char.from_buffer(view)
        result = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(window)), ctypes.c_size_t(size), vector)
        del window
        assert result == 0
        return sum(page & 1 for page in vector)


def test_a_new_file_is_direct_and_empty(open_file: Callable[..., DirectFile]) -> None:
    """Trying O_DIRECT leaves nothing in a new file, which only its owner may read."""
    file = open_file(direct=True)
    assert is_direct(file.fd)
    status = os.fstat(file.fd)
    assert status.st_size == 0
    assert status.st_mode & 0o777 == 0o600


def test_an_existing_file_is_not_changed(tmp_path: Path) -> None:
    """Trying O_DIRECT on a file with content changes nothing in it."""
    path = tmp_path / "file"
    path.write_bytes(b"content" * 1000)
    for _ in range(2):
        open_direct(path, create=True).close()
    assert path.read_bytes() == b"content" * 1000


def test_refused_at_open(engine: Engine, refuse_at_open: None, tmp_path: Path) -> None:
    """C30: where the flag itself is refused the file is buffered and works."""
    check_buffered(engine, open_direct(tmp_path / "file", create=True))


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_refused_at_the_first_transfer(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """C30: where the flag is accepted and reads or writes then fail, the file is buffered and works."""
    refuse_transfers(monkeypatch, name)
    check_buffered(engine, open_direct(tmp_path / "file", create=True))


def test_writes_refused_in_a_file_with_content(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """C30: writes are tried for a file with content too, but not in it, and nothing is left beside it."""
    path = tmp_path / "file"
    path.write_bytes(b"content" * 1000)
    refuse_transfers(monkeypatch, "pwritev")
    file = open_direct(path, create=False)
    assert path.read_bytes() == b"content" * 1000
    assert list(tmp_path.iterdir()) == [path]
    check_buffered(engine, file)


def test_large_sectors_are_found(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """C30: where 512 bytes are refused a file counts in pages, whether it is new or has content, and is still direct."""
    require_sectors(monkeypatch, PAGE)
    for _ in range(2):
        file = open_direct(tmp_path / "file", create=True)
        if not file.direct:
            pytest.skip("this file system has no O_DIRECT")
        assert file.granule_bytes == PAGE
        memory, back = Memory(3 * PAGE), Memory(3 * PAGE)
        data = memory.fill()
        engine.submit([memory.write(file, PAGE)])[0].wait()
        engine.submit([back.read(file, PAGE)])[0].wait()
        assert back.map[:] == data
        file.close()


def test_no_room_to_try_beside_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file with content opens on a full disk too: directly, and counting in pages, which serve every disk."""
    path = tmp_path / "file"
    path.write_bytes(b"content" * 1000)
    if not open_direct(path, create=False).direct:
        pytest.skip("this file system has no O_DIRECT")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwritev", full)
    in_its_content = open_direct(path, create=False)
    monkeypatch.setattr("tempfile.mkstemp", lambda **_: full())
    in_its_directory = open_direct(path, create=False)
    assert [(file.direct, file.granule_bytes) for file in (in_its_content, in_its_directory)] == [(True, PAGE)] * 2
    in_its_content.close()
    in_its_directory.close()


def check_buffered(engine: Engine, file: DirectFile) -> None:
    assert not file.direct
    assert not is_direct(file.fd)
    memory, back = Memory(5001), Memory(5001)
    data = memory.fill()
    engine.submit([memory.write(file, 3)])[0].wait()
    engine.submit([back.read(file, 3)])[0].wait()
    assert back.map[:] == data
    file.close()


def test_buffered_files_leave_no_cache(engine: Engine, open_file: Callable[..., DirectFile]) -> None:
    """C41: after a sync none of a buffered file's pages stay in the page cache, and reads leave none either."""
    file, memory = open_file(direct=False), Memory(4 << 20)
    if file.in_memory:
        pytest.skip("this directory is memory")
    memory.fill()
    engine.submit([memory.write(file, 0)])[0].wait()
    file.sync()
    assert resident_pages(file.path) == 0
    engine.submit([memory.read(file, 0)])[0].wait()
    assert resident_pages(file.path) == 0
    file.drop_cache(0, 0)
    assert file.path.read_bytes() == memory.map[:]
    assert resident_pages(file.path) > 0  # so that the zeros above mean something


@pytest.mark.skipif(memory_filesystem(SHM) is None, reason="/dev/shm is no tmpfs")
def test_memory_is_recognised(tmp_path: Path) -> None:
    """C28: a file on tmpfs is opened buffered and known to be memory."""
    path = SHM / f"infinity-test-{os.getpid()}"
    try:
        file = open_direct(path, create=True)
        assert (file.direct, file.in_memory) == (False, True)
        file.sync()
        file.close()
    finally:
        path.unlink(missing_ok=True)
    assert memory_filesystem(SHM) == "tmpfs"
    assert memory_filesystem(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("name", "number"), [("missing/file", errno.ENOENT), ("missing", errno.ENOENT), (".", errno.EISDIR)]
)
def test_files_that_cannot_be_opened(tmp_path: Path, name: str, number: int) -> None:
    """An open that fails names the path, the errno and a remedy."""
    with pytest.raises(StorageError, match=str(tmp_path)) as caught:
        open_direct(tmp_path / name, create=False)
    assert caught.value.errno == number
    assert caught.value.remedy


def test_no_space_at_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A full disk is not taken for a disk without O_DIRECT."""
    probe = open_direct(tmp_path / "probe", create=True)
    if not probe.direct:
        pytest.skip("this file system has no O_DIRECT")
    probe.close()

    def full(_fd: int, _buffers: list[object], _offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match="bytes are free") as caught:
        open_direct(tmp_path / "file", create=True)
    assert caught.value.errno == errno.ENOSPC


def test_closing_and_syncing(open_file: Callable[..., DirectFile]) -> None:
    """Closing twice is fine; syncing a closed file is an error that names it."""
    file = open_file(direct=False)
    file.close()
    file.close()
    with pytest.raises(StorageError, match="sync") as caught:
        file.sync()
    assert caught.value.errno == errno.EBADF


def test_free_bytes(tmp_path: Path) -> None:
    """Free space is a number for a directory that is there, and nothing for one that is not."""
    assert free_bytes(tmp_path) == os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert free_bytes(tmp_path / "missing") is None
