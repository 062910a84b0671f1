"""The manifest: what a committed checkpoint holds, as strict JSON, renamed in last. No pickle, no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

from infinity.checkpoint.failures import storage_errors
from infinity.checkpoint.specs import TensorSpec
from infinity.errors import CheckpointError, CheckpointIncomplete, CheckpointMismatch

MANIFEST = "manifest.json"
FORMAT = "infinity-checkpoint"
FORMAT_VERSION = 1

_STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What makes a model the same model: its parameters in order, and which names are aliases of a stored one."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    parameters: tuple[TensorSpec, ...]
    aliases: dict[str, str]  # tied name -> the name it is stored under

    def require_match(self, model: Fingerprint, *, where: str) -> None:
        """Raise CheckpointMismatch naming the first parameter in which `model` differs from this checkpoint."""
        theirs = {spec.name: spec for spec in model.parameters}
        ours = {spec.name: spec for spec in self.parameters}
        for name in (*theirs, *ours):
            if ours.get(name) != theirs.get(name):
                raise CheckpointMismatch(
                    f"{where} belongs to another model: parameter {name} is {_describe(ours.get(name))} in the checkpoint "
                    f"and {_describe(theirs.get(name))} in the model.",
                    remedy="Resume with the model and precision that the checkpoint was made with.",
                )
        for name in (*model.aliases, *self.aliases):
            if self.aliases.get(name) != model.aliases.get(name):
                raise CheckpointMismatch(
                    f"{where} belongs to another model: {name} is tied to {self.aliases.get(name, 'nothing')} in the "
                    f"checkpoint and to {model.aliases.get(name, 'nothing')} in the model.",
                    remedy="Resume with the model that the checkpoint was made with.",
                )


@dataclass(frozen=True, slots=True)
class Counters:
    """Everything that counts. Only applied steps advance the schedule and a parameter's own step count."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    global_step: int
    applied_steps: int
    skipped_steps: int
    schedule_position: int
    parameter_steps: dict[str, int]


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """What a run needs beside its tensors in order to go on. The JSON values are opaque to this room."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    fingerprint: Fingerprint
    precision: str
    counters: Counters
    data_position: JsonValue
    rng_state: JsonValue
    loss_scale: JsonValue = None  # of a dynamic one; None where there is none
    optimizer: str | None = None  # the class of torch's optimizer that made the updates; None: infinity's Adam or AdamW
    groups: JsonValue = None  # the numbers of each parameter group that are no longer those that the run began with


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file that belongs to the checkpoint: relative to it, or absolute for a swap file committed in place."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    path: str
    num_bytes: int
    header_crc32: int | None  # of a safetensors header; None for a swap file


@dataclass(frozen=True, slots=True)
class Manifest:
    """The whole of manifest.json."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    format: str
    format_version: int
    infinity_version: str
    created: str  # ISO 8601, UTC
    state: CheckpointState
    files: tuple[FileRecord, ...]

    @property
    def step(self) -> int:
        return self.state.counters.global_step

    @property
    def swap_files(self) -> tuple[FileRecord, ...]:
        """The files of a checkpoint that was committed in place; the store reads them, not this room."""
        return tuple(record for record in self.files if record.header_crc32 is None)


_MANIFEST = TypeAdapter(Manifest)
_STATE = TypeAdapter(CheckpointState)
Writable = TypeVar("Writable", Manifest, CheckpointState)


def write_manifest(directory: Path, state: CheckpointState, files: Sequence[FileRecord]) -> None:
    """Commit `directory`: temporary file, fsync, rename to manifest.json, fsync of the directory.

    The files must be on disk before. Raises CheckpointError for state that JSON cannot hold unchanged, StorageError.
    """
    created = datetime.now(UTC).isoformat(timespec="seconds")
    text = _encode(_MANIFEST, Manifest(FORMAT, FORMAT_VERSION, program_version(), created, state, tuple(files)))
    path = directory / MANIFEST
    temporary = directory / f"{MANIFEST}.partial"
    with storage_errors("Writing", path, num_bytes=len(text)):
        with temporary.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    sync_directory(directory)


def manifest_bytes(state: CheckpointState, files: Sequence[FileRecord]) -> int:
    """Return the length that the manifest will have."""
    return len(_encode(_MANIFEST, Manifest(FORMAT, FORMAT_VERSION, program_version(), "", state, tuple(files)))) + 64


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a committed directory.

    Raises CheckpointIncomplete without one, CheckpointMismatch for another version, CheckpointError for foreign JSON.
    """
    path = directory / MANIFEST
    with storage_errors("Reading", path):
        if not path.exists():
            raise CheckpointIncomplete(f"{directory} has no {MANIFEST}: the save did not end.")
        text = path.read_bytes()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}).") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not the manifest of an infinity checkpoint.", remedy="Give a directory that infinity wrote."
        )
    if found.get("format_version") != FORMAT_VERSION:
        raise CheckpointMismatch(
            f"{path} has format version {found.get('format_version')}, written by infinity {found.get('infinity_version')}; "
            f"this infinity ({program_version()}) reads version {FORMAT_VERSION}.",
            remedy="Use the infinity that wrote it.",
        )
    try:
        return _MANIFEST.validate_json(text)
    except ValidationError as error:
        raise _damaged(error, str(path)) from error


def state_to_json(state: CheckpointState) -> dict[str, JsonValue]:
    """Return the state as JSON values, for a manifest that the store writes (a commit in place).

    Raises CheckpointError for values that JSON cannot hold unchanged.
    """
    values: dict[str, JsonValue] = json.loads(_encode(_STATE, state))
    return values


def state_from_json(values: object, *, where: str) -> CheckpointState:
    """Return the state that `state_to_json` gave; `where` is the file that errors name. Raises CheckpointError."""
    try:
        return _STATE.validate_json(json.dumps(values))
    except ValidationError as error:
        raise _damaged(error, where) from error


def program_version() -> str:
    """Return the installed version of infinity, "source" where it runs uninstalled."""
    try:
        return version("infinity-train")
    except PackageNotFoundError:
        return "source"


def sync_directory(directory: Path) -> None:
    """Bring a directory's entries to disk."""
    with storage_errors("Syncing", directory):
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _encode(adapter: TypeAdapter[Writable], value: Writable) -> bytes:
    """Return the JSON of a dataclass, having made sure that it reads back as the same value."""
    try:
        text = json.dumps(asdict(value), indent=1, allow_nan=False).encode()
        unchanged = adapter.validate_json(text) == value
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The run's state cannot be written as JSON: {error}.") from error
    if not unchanged:
        raise CheckpointError(
            "The run's state changes when written as JSON.",
            remedy="Use lists instead of tuples, and text instead of numbers as keys.",
        )
    return text


def _damaged(error: ValidationError, where: str) -> CheckpointError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return CheckpointError(f"{where} is damaged: key {key}: {first['msg']}.")


def _describe(spec: TensorSpec | None) -> str:
    return "absent" if spec is None else f"{spec.dtype}{list(spec.shape)}"
