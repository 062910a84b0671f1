"""The NVMe directories of a run: the engine that works in them, how fast they are, and what each of them takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from infinity.aio.devices import open_device_engines
from infinity.aio.engine import Engine as IoEngine
from infinity.aio.filesystems import memory_filesystem
from infinity.aio.rates import DirectoryRate, measure_directories
from infinity.aio.select import Probe, open_engine, probe, works_in_all
from infinity.byte_sizes import format_bytes
from infinity.config import Config
from infinity.engine.in_place import Adoption
from infinity.placement import DirectoryLine
from infinity.store.checks import check_directory, device_of, require_distinct
from infinity.store.directory import remove_dead_runs
from infinity.store.extents import Shards, plan_extents
from infinity.store.stripes import Stripe
from infinity.store.swap_file import stripes_with_room


@dataclass(frozen=True, slots=True)
class Directories:
    """What is known of the directories before anything is reserved in them."""

    engine: IoEngine
    stripes: tuple[Stripe, ...]  # one a directory; empty where a checkpoint in place says how its bytes lie
    lines: tuple[DirectoryLine, ...]  # for the plan
    notes: tuple[str, ...]


def open_directories(
    config: Config,
    shards: Shards,
    *,
    grad_element_bytes: int,
    spare_memory_bytes: int,
    num_local_ranks: int,
    adopted: Adoption | None,
    probed: Mapping[Path, Probe],
    resources: ExitStack,
) -> Directories:
    """Check the directories, open their engine, and where there are several measure them and share out the bytes.

    `num_local_ranks` ranks share their space. Those on a file system in RAM take at most `spare_memory_bytes` together: what
    the plan leaves of this rank's budget. `probed` is what the caller has tried, by real path, and has told the user.
    Directories that nothing is going to live in are left alone. Raises StorageError, ConfigError, PlatformError.
    """
    if not any(plan_extents(shards, grad_element_bytes=grad_element_bytes).file_bytes):
        return Directories(_open_engine("threads", (), config, resources), (), (), ())
    if adopted is not None:
        paths = [run.parent for run in adopted.run_paths]
    else:
        paths = [check_directory(directory).path for directory in config.nvme_directories]
        require_distinct(config.nvme_directories)
    notes = [
        f"Removed {removed.path}, the swap files of a dead run: {format_bytes(removed.num_bytes)}."
        for path in paths
        for removed in remove_dead_runs(path)
    ]
    tried = {path: probe(path, config.infinity.engine) for path in paths if path not in probed}
    notes += [note for one in tried.values() for note in one.notes]
    found = works_in_all([tried.get(path) or probed[path] for path in paths])
    engine = _open_engine(found.engine, paths, config, resources)
    if adopted is not None:
        lines = [_line(DirectoryRate(path, None, 1.0), size) for path, size in zip(paths, adopted.file_bytes, strict=True)]
        return Directories(engine, (), tuple(lines), tuple(notes))
    rates = measure_directories(paths, engine) if len(paths) > 1 else (DirectoryRate(paths[0], None, 1.0),)
    stripes = _within_memory(
        paths, stripes_with_room(paths, [rate.weight for rate in rates], num_sharers=num_local_ranks), spare_memory_bytes
    )
    sizes = plan_extents(shards, grad_element_bytes=grad_element_bytes, stripes=stripes).file_bytes
    lines = [_line(rate, num_bytes) for rate, num_bytes in zip(rates, sizes, strict=True)]
    return Directories(engine, stripes, tuple(lines), tuple(notes))


def _open_engine(kind: str, directories: Sequence[Path], config: Config, resources: ExitStack) -> IoEngine:
    aio = config.aio

    def open_one() -> IoEngine:
        return open_engine(kind, queue_depth=aio.queue_depth, block_bytes=aio.block_size)

    engine = open_device_engines(directories, open_one)
    resources.callback(engine.close)
    return engine


def _within_memory(paths: Sequence[Path], stripes: Sequence[Stripe], spare_bytes: int) -> tuple[Stripe, ...]:
    """A directory in RAM is the fastest of all, and must not take what the budget does not have."""
    in_memory = [memory_filesystem(path) is not None for path in paths]
    most = spare_bytes // max(1, sum(in_memory))
    return tuple(
        replace(stripe, limit_bytes=min(most, stripe.limit_bytes or 0)) if is_memory else stripe
        for stripe, is_memory in zip(stripes, in_memory, strict=True)
    )


def _line(measured: DirectoryRate, num_bytes: int) -> DirectoryLine:
    rate = measured.rate
    return DirectoryLine(
        directory=str(measured.directory),
        device=device_of(measured.directory),
        num_bytes=num_bytes,
        read_bytes_per_second=rate.read_bytes_per_second if rate else None,
        write_bytes_per_second=rate.write_bytes_per_second if rate else None,
    )
