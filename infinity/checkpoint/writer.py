"""Writes one checkpoint: whole and on disk before it gets its name, old ones removed only after that.

step-00000012.partial-<pid>/  units/00000.safetensors ...  buffers.safetensors   each fsynced
                              manifest.json                                      fsynced, renamed
step-00000012/                                                                   renamed, parent fsynced
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from infinity.byte_sizes import PAGE_BYTES, format_bytes, round_up
from infinity.checkpoint.completeness import verify
from infinity.checkpoint.directory import discard, list_steps, partial_path, publish, remove_leftovers, step_path
from infinity.checkpoint.failures import storage_errors
from infinity.checkpoint.header import build_header
from infinity.checkpoint.manifest import CheckpointState, FileRecord, manifest_bytes, sync_directory, write_manifest
from infinity.checkpoint.sources import UnitSource, host_bytes
from infinity.checkpoint.stream import open_stream_writer
from infinity.errors import CheckpointError, ConfigError, StorageError, SwapSpaceError

UNITS = "units"
BUFFERS = "buffers.safetensors"
_METADATA = {"format": "pt"}  # what loaders of the safetensors library expect


def required_bytes(units: Iterable[UnitSource], buffers: UnitSource | None = None) -> int:
    """Return the bytes that the files of a checkpoint take on disk, in whole pages, without the manifest."""
    lengths = (build_header(unit.specs, _METADATA).file_bytes for unit in (*units, *_given(buffers)))
    return sum(round_up(length, PAGE_BYTES) for length in lengths)


def write_checkpoint(
    directory: Path,
    units: Iterable[UnitSource],
    state: CheckpointState,
    *,
    buffers: UnitSource | None = None,
    swap_files: Sequence[FileRecord] = (),
    keep: int | None = None,
) -> Path:
    """Write `<directory>/step-<global step>` and return its path.

    `swap_files` are the store's files, on disk already, that take the place of units (a commit in place). With the store's
    own commit record among them, the checkpoint stops being complete as soon as the store writes to its files again.
    With `keep`, only that many complete checkpoints remain, the new one among them; swap files are never removed. A
    checkpoint of the same step is replaced in one atomic rename.

    Raises SwapSpaceError (before writing, with needed and free bytes, or when the disk fills), StorageError,
    CheckpointError when a source does not give every element once. After an error the earlier
    checkpoints are untouched and of the new one nothing is left, unless it was complete and only removing old ones failed.
    """
    if keep is not None and keep < 1:
        raise ConfigError(f"keep is {keep}: at least the checkpoint just written must stay.", remedy="Give 1 or more.")
    members = tuple(units)
    _require_distinct((*members, *_given(buffers)))
    with storage_errors("Creating", directory):
        directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    _require_space(directory, required_bytes(members, buffers) + round_up(manifest_bytes(state, swap_files), PAGE_BYTES))
    final = step_path(directory, state.counters.global_step)
    partial = partial_path(final)
    try:
        with storage_errors("Creating", partial):
            (partial / UNITS).mkdir(parents=True)
        files = [_write_unit(partial, f"{UNITS}/{index:05d}.safetensors", unit) for index, unit in enumerate(members)]
        files += [_write_unit(partial, BUFFERS, unit) for unit in _given(buffers)]
        sync_directory(partial / UNITS)
        write_manifest(partial, state, (*files, *swap_files))
        publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # what failed, or the one replaced
    if keep is not None:
        _keep_newest(directory, keep, final)
    return final


def _given(buffers: UnitSource | None) -> tuple[UnitSource, ...]:
    return () if buffers is None else (buffers,)


def _write_unit(directory: Path, name: str, unit: UnitSource) -> FileRecord:
    specs = {spec.name: spec for spec in unit.specs}
    with open_stream_writer(directory / name, unit.specs, _METADATA) as writer:
        for tensor, first_element, data in unit.pieces():
            if tensor not in specs:
                raise CheckpointError(f"Unit {unit.name} gave a piece of {tensor}, which it did not announce.")
            writer.write(tensor, first_element, host_bytes(specs[tensor], data))
        written = writer.finish()
    return FileRecord(name, written.num_bytes, written.header_crc32)


def _require_distinct(units: Sequence[UnitSource]) -> None:
    owners: dict[str, str] = {}
    for unit in units:
        for spec in unit.specs:
            if spec.name in owners:
                raise CheckpointError(f"Tensor {spec.name} belongs to two units, {owners[spec.name]} and {unit.name}.")
            owners[spec.name] = unit.name


def _require_space(directory: Path, needed: int) -> None:
    with storage_errors("Reading the free space of", directory):
        free = shutil.disk_usage(directory).free
    if needed > free:
        raise SwapSpaceError(
            f"A checkpoint in {directory} needs {format_bytes(needed)} ({needed} bytes), "
            f"{format_bytes(free)} ({free} bytes) are free.",
            remedy="Free space there, keep fewer checkpoints, or choose another directory.",
        )


def _keep_newest(directory: Path, keep: int, written: Path) -> None:
    """Remove all but `keep` complete checkpoints; incomplete ones do not count and are left for the user to see."""
    others = [path for path in list_steps(directory) if path != written and _complete(path)]
    for path in others[keep - 1 :]:
        discard(path)


def _complete(path: Path) -> bool:
    try:
        verify(path)
    except (CheckpointError, StorageError):
        return False
    return True
