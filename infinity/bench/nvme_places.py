"""Whether the directories can be measured, with which engines, and with how large a file: checked in the first second.

The first thing that a benchmark does in a directory is to claim a run directory there, which the next run or `infinity
clean` recognises and removes should this process be killed. While it is there nobody else removes the directory.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from infinity.aio.select import probe
from infinity.bench.nvme_jobs import ENGINES, WRITING_JOB, Job, NvmeSettings, batches_of
from infinity.byte_sizes import MIB, format_bytes
from infinity.errors import ConfigError, PlatformError, StorageError
from infinity.memory.limits import host_limit_bytes
from infinity.store.checks import DirectoryFacts, check_directory
from infinity.store.directory import claim_run, remove_dead_runs
from infinity.store.swap_file import require_space, reserve_bytes

# Of the memory that is left: the share that files in a tmpfs may take.
_MEMORY_SHARE = 0.25
_RUN_NAME = "bench"
_NUM_CLAIMS = 5


@dataclass(frozen=True, slots=True)
class Places:
    """What was found. `size_bytes` is the file's in each directory; `notes` are sentences for the user."""

    directories: tuple[DirectoryFacts, ...]
    run_paths: tuple[Path, ...]  # one in each of them, this process's own, for the file
    engines: tuple[str, ...]
    direct: Mapping[str, bool]  # by engine: whether O_DIRECT is in force in every directory
    size_bytes: int
    size_was_given: bool
    notes: tuple[str, ...]


def check_places(settings: NvmeSettings, jobs: Sequence[Job], resources: ExitStack) -> Places:
    """Check the directories, and make those of which only the last part is missing; claim a run directory in each.

    `resources` removes the run directories, and what was made when it is empty.
    Raises ConfigError, StorageError, SwapSpaceError, PlatformError, each before anything of size is written.
    """
    if not settings.directories:
        raise ConfigError("--nvme: no directory is given.", remedy="Give --nvme DIR, a directory on the disk to measure.")
    facts: list[DirectoryFacts] = []
    run_paths: list[Path] = []
    notes: list[str] = []
    for path in settings.directories:
        run_path = _claim(path, resources)
        directory = run_path.parent
        if directory in (other.path for other in facts):
            raise ConfigError(f"--nvme: {directory} is given twice.", remedy="Give each directory once.")
        for removed in remove_dead_runs(directory):
            notes.append(f"Removed {removed.path}, the files of a dead run: {format_bytes(removed.num_bytes)}.")
        run_paths.append(run_path)
        facts.append(check_directory(directory))
    direct, probed = _probe_engines(settings.engine, facts)
    needed_bytes = max(batches_of(job).num_bytes for job in (*jobs, WRITING_JOB))
    size_bytes = _choose_size(settings, needed_bytes, facts, notes)
    return Places(
        tuple(facts), tuple(run_paths), tuple(direct), direct, size_bytes, settings.size_bytes is not None, (*probed, *notes)
    )  # fmt: skip


def _claim(path: Path, resources: ExitStack) -> Path:
    """Claim a run directory in `path`, which is made where it is missing; return the run directory.

    Another benchmark that made `path` and ends may remove it between our two steps: then it is made again.
    """
    for _ in range(_NUM_CLAIMS - 1):
        try:
            return _claim_once(path, resources)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
    return _claim_once(path, resources)


def _claim_once(path: Path, resources: ExitStack) -> Path:
    is_new = not os.path.lexists(path)
    directory = check_directory(path).path
    if is_new:
        resources.callback(_remove_if_empty, directory)
    run = claim_run(directory, _RUN_NAME)
    resources.callback(run.close)
    return run.path


def _probe_engines(wanted: str, facts: Sequence[DirectoryFacts]) -> tuple[dict[str, bool], tuple[str, ...]]:
    """Return the engines that work in every directory, each with whether O_DIRECT does, and what was not available."""
    notes: dict[str, None] = {}
    engines: dict[str, bool] = {}
    for kind in ENGINES if wanted == "all" else (wanted,):
        direct = True
        try:
            for directory in facts:
                found = probe(directory.path, kind)
                direct = direct and found.direct
                notes |= dict.fromkeys(found.notes)
                kind = found.engine
        except PlatformError as error:
            if wanted != "all":
                raise
            notes[f"The engine {kind} is left out: {error}"] = None
        else:
            engines[kind] = direct
    return engines, tuple(notes)


def _choose_size(settings: NvmeSettings, needed_bytes: int, facts: Sequence[DirectoryFacts], notes: list[str]) -> int:
    """Return the size of each file. Raises ConfigError when a given one is too small, SwapSpaceError without room for it."""
    given = settings.size_bytes
    if given is not None and given < needed_bytes:
        raise ConfigError(
            f"--size: {format_bytes(given)} is less than the {format_bytes(needed_bytes)} that are on their way at a time.",
            remedy="Give a larger --size, or a smaller --block-size or --queue-depth.",
        )
    require_space([(directory.path, given or needed_bytes) for directory in facts])
    if given is not None:
        return given
    wanted_bytes = max(needed_bytes, settings.wanted_bytes)
    fitting_bytes = min(_room(directory) for directory in facts) // len(facts) // MIB * MIB
    size_bytes = max(needed_bytes, min(wanted_bytes, fitting_bytes))
    if size_bytes < wanted_bytes:
        notes.append(f"The file has {format_bytes(size_bytes)}: there is no room for {format_bytes(wanted_bytes)}.")
    return size_bytes


def _room(directory: DirectoryFacts) -> int:
    free_bytes = directory.free_bytes - reserve_bytes(directory.path)
    if directory.is_memory:
        return min(free_bytes, int(host_limit_bytes().num_bytes * _MEMORY_SHARE))
    return free_bytes


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
