"""The table of mounts: what its lines mean, and which of them holds a path."""

from __future__ import annotations

from pathlib import Path

from infinity.aio.mounts import Mount, mount_of, read_mounts

TABLE = """\
22 1 8:1 / / rw,relatime shared:1 master:2 - ext4 /dev/sda1 rw,discard
30 22 0:41 / /mnt/my\\040disk ro,nosuid - nfs4 server:/a\\134b rw,vers=4.2
31 22 0:42 / /mnt rw - tmpfs none
"""


def test_the_lines_of_the_table(tmp_path: Path) -> None:
    """Blanks in paths are unescaped, optional fields skipped, options of mount and file system put together."""
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    root, share, memory = read_mounts(table)
    assert root == Mount(Path("/"), "8:1", "ext4", "/dev/sda1", frozenset({"rw", "relatime", "discard"}))
    assert (share.point, share.source) == (Path("/mnt/my disk"), "server:/a\\b")
    assert share.options == {"ro", "nosuid", "rw", "vers=4.2"}
    assert (memory.file_system, memory.source, memory.options) == ("tmpfs", "none", {"rw"})
    assert mount_of(Path("/mnt/my disk/x"), (root, share, memory)) == share
    assert mount_of(Path("/mnt/my"), (root, share, memory)) == memory
    assert mount_of(Path("/mnt"), ()) is None


def test_a_system_without_the_table(tmp_path: Path) -> None:
    """No table, no mounts."""
    assert read_mounts(tmp_path / "none") == ()
