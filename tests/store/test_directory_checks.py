"""An unfit directory is refused in one clear sentence before anything is made in it."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity.errors import StorageError
from infinity.store.checks import check_directory

NOBODY = 65534


def test_a_missing_directory_is_made_below_an_existing_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--nvme ./scratch` just works, and the relative path is resolved at once. C31."""
    monkeypatch.chdir(tmp_path)
    facts = check_directory(Path("./scratch"))
    assert facts.path == tmp_path / "scratch"
    assert facts.path.is_dir()
    assert facts.writable
    assert facts.free_bytes > 0
    assert list(facts.path.iterdir()) == []


def test_a_missing_parent_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    """A typing error in a path makes no directories. C31."""
    path = tmp_path / "no" / "such"
    with pytest.raises(StorageError, match=f"{path} does not exist.*mkdir -p {path}"):
        check_directory(path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_refused(tmp_path: Path) -> None:
    """A regular file is no directory, and stays as it is. C7."""
    path = tmp_path / "weights.bin"
    path.write_bytes(b"mine")
    with pytest.raises(StorageError, match=f"{path} is a file, not a directory") as caught:
        check_directory(path)
    assert caught.value.errno == errno.ENOTDIR
    assert path.read_bytes() == b"mine"


def test_dev_null_is_refused() -> None:
    """/dev/null is a character device; a mount point is suggested. C7."""
    with pytest.raises(StorageError, match=r"/dev/null is a character device, not a directory.*mount point"):
        check_directory(Path("/dev/null"))


def test_a_mounted_block_device_suggests_its_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk itself is refused and the place where it is mounted is named. C7."""
    device = next((node for node in sorted(Path("/dev").iterdir()) if node.is_block_device()), None)
    if device is None:
        pytest.skip("this machine shows no block device")
    number = device.stat().st_rdev
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 {os.major(number)}:{os.minor(number)} / /mnt/my\\040ssd rw - ext4 /dev/x rw\n")
    monkeypatch.setattr("infinity.store.checks._MOUNT_TABLE", table)
    with pytest.raises(StorageError, match=r"is a block device, not a directory.*mounted at /mnt/my ssd"):
        check_directory(device)


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    """A link to nowhere cannot be reached."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match=f"{link} cannot be reached"):
        check_directory(link)


def test_a_link_to_a_directory_is_followed(tmp_path: Path) -> None:
    """Disks are often reached through links; the facts name the real place."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert check_directory(tmp_path / "link").path == tmp_path / "real"


@pytest.fixture
def foreign_directory() -> Iterator[Path]:
    """A directory of root, seen by another user."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        os.seteuid(NOBODY)
        try:
            yield Path(name)
        finally:
            os.seteuid(0)


def test_a_directory_of_somebody_else_says_user_and_mode(foreign_directory: Path) -> None:
    """Not writable: the user, the mode and a fix are in the sentence. C31."""
    with pytest.raises(StorageError, match=rf"not writable for user {NOBODY} \(mode 755\).*chown {NOBODY}") as caught:
        check_directory(foreign_directory)
    assert caught.value.errno == errno.EACCES


def test_a_missing_directory_in_a_place_of_somebody_else_says_so(foreign_directory: Path) -> None:
    """The parent's owner and mode are what matters then. C31."""
    with pytest.raises(StorageError, match=rf"cannot be made in {foreign_directory} for user {NOBODY}"):
        check_directory(foreign_directory / "scratch")


def test_a_read_only_mount_is_named(read_only_disk: Path) -> None:
    """A read-only file system is refused, also for root, also for a directory to be made. C31."""
    for path in (read_only_disk, read_only_disk / "scratch"):
        with pytest.raises(StorageError, match="mounted read-only") as caught:
            check_directory(path)
        assert caught.value.errno == errno.EROFS


def test_memory_file_systems_are_recognised(small_disk: Path) -> None:
    """tmpfs works, and is known to be RAM. C28."""
    facts = check_directory(small_disk)
    assert (facts.file_system, facts.is_memory) == ("tmpfs", True)
    assert 0 < facts.free_bytes <= 4 << 20


def test_the_deepest_and_latest_mount_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nested mounts the longest wins, of two on one point the later."""
    from infinity.store.checks import file_system_of

    table = tmp_path / "mountinfo"
    lines = ["1 0 8:1 / / rw - ext4 x rw", "2 1 8:2 / /mnt rw - xfs y rw", "3 2 8:3 / /mnt rw shared:1 - btrfs z rw"]
    table.write_text("\n".join([*lines, "4 3 8:4 / /mnt/a rw - nfs4 q rw"]) + "\n")
    monkeypatch.setattr("infinity.store.checks._MOUNT_TABLE", table)
    found = [file_system_of(Path(path)) for path in ("/home", "/mnt/b", "/mnt/a/deep", "/mntx")]
    assert found == ["ext4", "btrfs", "nfs4", "ext4"]
