"""How large the file is, where there is little room or little time; and what of it is used."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from bench_fakes import Silent, files_below

from infinity.bench import nvme_places
from infinity.bench.nvme_bed import open_targets
from infinity.bench.nvme_jobs import WRITING_JOB, Job, NvmeSettings, Traffic
from infinity.bench.nvme_places import Places, check_places
from infinity.byte_sizes import MIB
from infinity.errors import SwapSpaceError
from infinity.store.checks import DirectoryFacts, check_directory

JOB = Job(Traffic.READ, MIB, 8)


def places_in(monkeypatch: pytest.MonkeyPatch, directory: Path, settings: NvmeSettings, **facts: object) -> Places:
    """Check a directory of which the system says `facts`."""

    def told(path: Path) -> DirectoryFacts:
        return replace(check_directory(path), **facts)  # type: ignore[arg-type]

    monkeypatch.setattr(nvme_places, "check_directory", told)
    with ExitStack() as resources:
        return check_places(replace(settings, directories=(directory,)), (JOB,), resources)


def test_a_nearly_full_disk_gets_a_smaller_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --size the file takes what fits beside the reserve, and the user is told (C145)."""
    reserve = nvme_places.reserve_bytes(tmp_path)
    places = places_in(monkeypatch, tmp_path, NvmeSettings(()), free_bytes=reserve + 100 * MIB + 1)
    assert places.size_bytes == 100 * MIB
    assert any("no room for 4.00 GiB" in note for note in places.notes)


def test_a_file_in_memory_takes_a_share_of_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tmpfs the file takes at most a quarter of the memory that is left."""
    limit = replace(nvme_places.host_limit_bytes(), num_bytes=1200 * MIB)
    monkeypatch.setattr(nvme_places, "host_limit_bytes", lambda: limit)
    assert places_in(monkeypatch, tmp_path, NvmeSettings(()), is_memory=True).size_bytes == 300 * MIB


def test_a_size_that_has_no_room_is_refused(tmp_path: Path) -> None:
    """An explicit --size is never made smaller: needed and free bytes are in the error."""
    with ExitStack() as resources, pytest.raises(SwapSpaceError, match="are needed"):
        check_places(NvmeSettings((tmp_path,), size_bytes=1 << 50), (JOB,), resources)


def test_a_slow_disk_uses_the_file_as_far_as_it_was_written(tmp_path: Path) -> None:
    """When the time for writing is over, what was not written is not read: it would come from no disk (C145)."""
    settings, observer = NvmeSettings((tmp_path,), size_bytes=256 * MIB, engine="threads"), Silent()
    with ExitStack() as resources:
        places = check_places(settings, (JOB,), resources)
        (target,), written = open_targets(places, (JOB,), write_seconds=0.0, tell=observer.phase, resources=resources)
        assert target.file_bytes == written < 256 * MIB
        assert target.file_bytes % (8 * MIB) == 0
        path = target.file.path
        assert path.stat().st_size == 256 * MIB
        assert any(path.read_bytes()[target.file_bytes - 4096 : target.file_bytes])
        unwritten = path.read_bytes()[target.file_bytes :]
        assert unwritten == bytes(len(unwritten))
    assert files_below(tmp_path) == []


def test_the_whole_file_is_written_with_bytes_that_differ(tmp_path: Path) -> None:
    """With time enough every page of the file holds random bytes, in whole requests, before anything is timed."""
    settings, observer = NvmeSettings((tmp_path,), size_bytes=65 * MIB, engine="threads"), Silent()
    with ExitStack() as resources:
        places = check_places(settings, (WRITING_JOB,), resources)
        (target,), _ = open_targets(places, (JOB,), write_seconds=None, tell=observer.phase, resources=resources)
        assert target.file_bytes == 64 * MIB
        content = target.file.path.read_bytes()[: target.file_bytes]
        assert len({content[offset : offset + 16] for offset in range(0, len(content), 4096)}) == len(content) // 4096
