"""Which engine is chosen on which machine, and what is said about those that are not available."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from aio_cases import run_python
from test_direct_files import SHM, refuse_transfers

from infinity.aio import filesystems, select, uring
from infinity.aio.filesystems import memory_filesystem, network_filesystem
from infinity.aio.mounts import Mount
from infinity.aio.select import open_engine, probe
from infinity.errors import ConfigError, PlatformError, StorageError


@pytest.fixture
def no_ring(monkeypatch: pytest.MonkeyPatch) -> object:
    """Make the native module refuse to open a ring with a given errno."""
    pytest.importorskip("infinity._aio", reason="built without liburing")

    def refuse(number: int) -> None:
        monkeypatch.setattr(uring, "_lib", SimpleNamespace(aio_open=lambda *_: -number))

    return refuse


def test_what_this_machine_has(kind: str, tmp_path: Path) -> None:
    """The probe names the engine whose round trip worked and what it registered, and removes its file."""
    found = probe(tmp_path, kind)
    assert found.engine == kind
    assert (found.registers_files, found.registers_buffers) == (kind == "uring", kind == "uring")
    assert list(tmp_path.iterdir()) == []


def test_io_uring_switched_off(no_ring: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """C23: with kernel.io_uring_disabled=2 the sentence names the setting and how to change it."""
    switch = tmp_path / "io_uring_disabled"
    switch.write_text("2\n")
    monkeypatch.setattr(uring, "_SWITCH", switch)
    no_ring(errno.EPERM)
    [note] = [note for note in probe(tmp_path).notes if "io_uring" in note]
    assert "kernel.io_uring_disabled=2" in note
    assert "sysctl kernel.io_uring_disabled=0" in note


def test_too_little_locked_memory_for_a_ring(no_ring: object, tmp_path: Path) -> None:
    """C25: a ring that is refused for memory gives way to threads, with the needed and the current limit."""
    no_ring(errno.ENOMEM)
    [note] = [note for note in probe(tmp_path).notes if "io_uring" in note]
    assert "it needs about" in note
    assert "the limit is" in note
    assert "ulimit -l" in note
    assert open_engine("auto").name == "threads"


@pytest.mark.skipif(memory_filesystem(SHM) is None, reason="/dev/shm is no tmpfs")
def test_a_directory_in_memory(kind: str) -> None:
    """C28: tmpfs works, buffered, and the probe says that it is memory and not a disk."""
    found = probe(SHM, kind)
    assert not found.direct
    [note] = [note for note in found.notes if "uring" not in note]
    assert "/dev/shm is memory (tmpfs), not a disk" in note


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_directory_without_direct_io(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """C30: where only direct writes, or only direct reads, fail, both go through the page cache and the probe says so."""
    if memory_filesystem(tmp_path):
        pytest.skip("this directory is memory")
    refuse_transfers(monkeypatch, name)
    found = probe(tmp_path)
    assert not found.direct
    [note] = [note for note in found.notes if "uring" not in note]
    assert "refuses O_DIRECT" in note
    assert "ext4 or XFS" in note


def test_a_missing_native_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """C21, C22: without the native module threads do the work, and the sentence says what to install, on any system."""
    monkeypatch.setattr(uring, "_lib", None)
    monkeypatch.setattr(uring, "_import_error", "no such module", raising=False)
    found = probe(tmp_path)
    assert found.engine == "threads"
    [note] = [note for note in found.notes if "io_uring" in note]
    assert "infinity._aio is missing" in note
    assert "liburing" in note
    with pytest.raises(PlatformError, match="missing"):
        open_engine("uring")


def test_a_system_without_preadv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """C21, C24: without io_uring and without preadv the buffered engine does the work; threads by name are refused."""
    monkeypatch.setattr(uring, "_lib", None)
    monkeypatch.setattr(uring, "_import_error", "no such module", raising=False)
    monkeypatch.delattr(os, "preadv")
    monkeypatch.setattr("infinity.aio.direct._FLAG", 0)
    found = probe(tmp_path)
    assert (found.engine, found.direct) == ("buffered", False)
    assert [note for note in found.notes if "no preadv" in note and note.endswith('"buffered" does the I/O instead.')]
    opened = open_engine("auto")
    assert opened.name == "buffered"
    opened.close()
    with pytest.raises(PlatformError, match='Use the engine "buffered"'):
        open_engine("threads")


def test_another_system(tmp_path: Path) -> None:
    """C22: aio can be imported, and moves bytes, where nothing that only Linux has exists."""
    script = (
        "import os, sys\n"
        "for name in ('preadv', 'pwritev', 'O_DIRECT', 'posix_fadvise', 'fdatasync', 'sched_getaffinity'):\n"
        "    delattr(os, name)\n"
        "sys.platform, sys.modules['infinity._aio'] = 'other', None\n"
        "from pathlib import Path\n"
        "from infinity.aio.files import open_direct\n"
        "from infinity.aio.select import probe\n"
        "found = probe(Path(sys.argv[1]))\n"
        "file = open_direct(sys.argv[1] + '/file', create=True)\n"
        "file.sync()\n"
        "print(found.engine, file.direct, file.in_memory)\n"
    )
    result = run_python("-c", script, str(tmp_path))
    assert result.stdout.split() == ["buffered", "False", "False"], result.stderr


def test_the_buffered_engine_says_what_it_costs(tmp_path: Path) -> None:
    """C145: asked for by name, the buffered engine leaves O_DIRECT alone, and the probe says that there is a page cache."""
    found = probe(tmp_path, "buffered")
    assert (found.engine, found.direct) == ("buffered", False)
    if not memory_filesystem(tmp_path):
        [note] = found.notes
        assert "through the page cache" in note


@pytest.mark.parametrize("name", ["nfs4", "virtiofs", "fuse.sshfs"])
def test_a_network_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """C28: a directory on another machine works, and the probe says what it is, whatever number its file system has."""
    mounts = (Mount(Path("/"), "8:1", "ext4", "/dev/sda1", frozenset()), Mount(tmp_path, "0:41", name, "a:/b", frozenset()))
    monkeypatch.setattr(filesystems, "read_mounts", lambda: mounts)
    assert [note for note in probe(tmp_path).notes if f"is a network mount ({name})" in note]
    assert network_filesystem(tmp_path.parent) is None


@pytest.mark.parametrize(("magic", "name"), [(0x6969, "nfs"), (0xFE534D42, "smb3"), (0xEF53, None)])
def test_a_network_mount_without_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, magic: int, name: str | None
) -> None:
    """C28: where there is no table of mounts the number of the file system tells the usual ones, by the same names."""
    monkeypatch.setattr(filesystems, "read_mounts", lambda: ())
    monkeypatch.setattr(filesystems, "_magic", lambda _: magic)
    assert network_filesystem(tmp_path) == name
    assert set(filesystems._NETWORK_MAGICS.values()) <= filesystems.NETWORK_FILE_SYSTEMS


def test_a_ring_that_opens_and_then_fails(no_ring: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """C24: opening a ring proves nothing: where its round trip fails threads take over."""
    failing = dict.fromkeys(range(200), -errno.EINVAL)
    monkeypatch.setitem(select._OPENERS, "uring", lambda **sizes: uring.open_uring(**sizes, faults=failing))
    found = probe(tmp_path)
    assert found.engine == "threads"
    assert any("io_uring cannot be used in" in note for note in found.notes)
    with pytest.raises(StorageError):
        probe(tmp_path, "uring")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_engine(tmp_path: Path) -> None:
    """An unknown kind is a configuration error that lists the known ones."""
    for call in (lambda: open_engine("libaio"), lambda: probe(tmp_path, "libaio")):
        with pytest.raises(ConfigError, match=r"'libaio' is unknown.*auto, uring, threads, buffered"):
            call()


@pytest.mark.parametrize(("queue_depth", "block_bytes"), [(0, 4096), (4097, 4096), (8, 0), (8, (1 << 30) + 1)])
def test_sizes_out_of_range(kind: str, queue_depth: int, block_bytes: int) -> None:
    """Sizes that an engine does not take are refused with the range."""
    with pytest.raises(PlatformError, match="1 to 4096"):
        open_engine(kind, queue_depth=queue_depth, block_bytes=block_bytes)


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    """C7, C31: a missing path, a file and a device are refused with the reason, and nothing is touched."""
    file = tmp_path / "file"
    file.write_text("mine")
    for path, number, text in [
        (tmp_path / "missing", errno.ENOENT, "Create it"),
        (file, errno.ENOTDIR, "is not a directory but a file"),
        (Path("/dev/null"), errno.ENOTDIR, "is not a directory but a device.*mount point"),
    ]:
        with pytest.raises(StorageError, match=text) as caught:
            probe(path)
        assert caught.value.errno == number
        assert str(path) in str(caught.value)
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


def test_a_directory_of_somebody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """C31: a directory that is not writable is refused with the user and the directory's mode and owner."""

    def deny(**_: object) -> tuple[int, str]:
        raise PermissionError(errno.EACCES, "denied")

    monkeypatch.setattr("tempfile.mkstemp", deny)  # root may write anywhere, so that a real mode shows nothing
    with pytest.raises(StorageError, match=f"This user is {os.geteuid()}.*has mode d.*owner") as caught:
        probe(tmp_path)
    assert caught.value.errno == errno.EACCES


def test_a_disk_that_returns_other_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A directory whose reads are not what was written is refused, and the file is removed."""
    real = os.preadv

    def corrupt(fd: int, buffers: list[object], offset: int) -> int:
        count = real(fd, buffers, offset)
        memoryview(buffers[0]).cast("B")[0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", corrupt)
    with pytest.raises(StorageError, match="other bytes than were written"):
        probe(tmp_path, "threads")
    assert list(tmp_path.iterdir()) == []
