"""Is this checkpoint whole? The manifest is there, every file it names has its length and header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity.checkpoint.directory import list_steps
from infinity.checkpoint.failures import storage_errors
from infinity.checkpoint.manifest import FileRecord, Manifest, read_manifest
from infinity.checkpoint.specs import TensorSpec
from infinity.checkpoint.stream import Written, open_stream_reader
from infinity.errors import CheckpointError, CheckpointIncomplete, CheckpointMismatch, StorageError


@dataclass(frozen=True, slots=True)
class Complete:
    """A checkpoint that was found whole."""

    path: Path
    manifest: Manifest
    tensors: Mapping[str, tuple[Path, TensorSpec]]  # stored name -> the file that holds it, what it is


@dataclass(frozen=True, slots=True)
class Latest:
    """The newest whole checkpoint of a directory, and one sentence for each newer one that was passed over."""

    found: Complete | None
    passed_over: tuple[str, ...]


def verify(path: Path) -> Complete:
    """Return the checkpoint at `path`, having compared every file with the manifest (lengths and headers, not the data).

    Raises CheckpointIncomplete for what is missing or truncated, CheckpointMismatch for another format version,
    CheckpointError for what is foreign or damaged.
    """
    manifest = read_manifest(path)
    tensors: dict[str, tuple[Path, TensorSpec]] = {}
    for record in manifest.files:
        file = path / record.path
        if record.header_crc32 is None:
            _verify_length(file, record)
            continue
        with open_stream_reader(file) as reader:
            if reader.written != Written(record.num_bytes, record.header_crc32):
                raise CheckpointError(
                    f"{file} is not the file that {path / 'manifest.json'} names: expected {record.num_bytes} bytes with "
                    f"header checksum {record.header_crc32:08x}, found {reader.written.num_bytes} bytes with "
                    f"{reader.written.header_crc32:08x}."
                )
            tensors.update((spec.name, (file, spec)) for spec in reader.specs)
    return Complete(path, manifest, tensors)


def latest(directory: Path) -> Latest:
    """Find the newest whole checkpoint in a run's checkpoint directory; an absent directory has none.

    Raises CheckpointMismatch when the newest one was written by another version: training on from an older one would
    silently lose steps.
    """
    passed_over: list[str] = []
    with storage_errors("Reading", directory):
        steps = list_steps(directory) if directory.exists() else ()
    for path in steps:
        try:
            return Latest(verify(path), tuple(passed_over))
        except CheckpointMismatch:
            raise
        except (CheckpointError, StorageError) as error:
            passed_over.append(f"{path.name} was passed over: {error}")
    return Latest(None, tuple(passed_over))


def _verify_length(file: Path, record: FileRecord) -> None:
    with storage_errors("Reading", file):
        if not file.exists():
            raise CheckpointIncomplete(f"{file} is missing.")
        found = file.stat().st_size
    if found != record.num_bytes:
        raise CheckpointIncomplete(f"{file} has another length: expected {record.num_bytes} bytes, found {found}.")
