"""Opens a checkpoint and reads ranges of its tensors, so that a load needs no more memory than one tile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from infinity.checkpoint.completeness import Complete, latest, verify
from infinity.checkpoint.failures import storage_errors
from infinity.checkpoint.manifest import MANIFEST, CheckpointState, Fingerprint, Manifest
from infinity.checkpoint.sources import HostData, host_bytes
from infinity.checkpoint.specs import TensorSpec, tensor_name
from infinity.checkpoint.stream import StreamReader, open_stream_reader
from infinity.errors import CheckpointError, CheckpointIncomplete, CheckpointMismatch

_REMEDY = "Give a checkpoint (a step-... directory) or the directory that holds them."


class Checkpoint:
    """A whole checkpoint open for reading. Owner: who opened it; not thread-safe; reading on after an error is fine.

    At most one file is open at a time, so reading unit by unit is cheap for any number of units.
    """

    def __init__(self, complete: Complete, passed_over: tuple[str, ...]) -> None:
        self.path = complete.path
        self.manifest: Manifest = complete.manifest
        self.passed_over = passed_over  # one sentence for each newer checkpoint that was not whole
        self._tensors = complete.tensors
        self._open: StreamReader | None = None

    @property
    def state(self) -> CheckpointState:
        return self.manifest.state

    def require_match(self, fingerprint: Fingerprint) -> None:
        """Raise CheckpointMismatch naming the first parameter in which the model differs, with both shapes and dtypes."""
        self.state.fingerprint.require_match(fingerprint, where=str(self.path))

    def specs(self, kind: str) -> Iterator[tuple[str, TensorSpec]]:
        """Yield (parameter or buffer, spec) for every tensor of a kind that is stored."""
        prefix = tensor_name(kind, "")
        for name, (_, spec) in self._tensors.items():
            if name.startswith(prefix):
                yield name.removeprefix(prefix), spec

    def kinds(self) -> frozenset[str]:
        """Return every kind of tensor that is stored."""
        return frozenset(name.partition("/")[0] for name in self._tensors)

    def read(self, parameter: str, kind: str, first_element: int, num_elements: int, into: HostData) -> None:
        """Fill `into` with a run of elements of a parameter's weight, buffer or plane of optimizer state.

        Raises CheckpointMismatch when the checkpoint has no such tensor, CheckpointError for a range outside it or a
        buffer of another dtype or length, StorageError.
        """
        name = tensor_name(kind, parameter)
        if name not in self._tensors:
            raise CheckpointMismatch(f"{self.path} holds no {kind} of {parameter}.")
        file, spec = self._tensors[name]
        self._reader(file).read(name, first_element, num_elements, host_bytes(spec, into))

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _reader(self, file: Path) -> StreamReader:
        if self._open is None or self._open.path != file:
            self.close()
            self._open = open_stream_reader(file)
        return self._open

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint at `path`, or the newest whole one of a directory of checkpoints.

    Raises CheckpointIncomplete when a save did not end or files are missing or truncated, CheckpointMismatch for another
    format version, CheckpointError for a path that is absent, a file, empty or foreign, StorageError.
    """
    with storage_errors("Reading", path):
        if not path.exists():
            raise CheckpointError(f"{path} does not exist.", remedy=_REMEDY)
        if not path.is_dir():
            raise CheckpointError(f"{path} is a file, not a checkpoint.", remedy=_REMEDY)
        committed = (path / MANIFEST).exists()
    if committed or path.name.startswith("step-"):
        return Checkpoint(verify(path), ())
    newest = latest(path)
    if newest.found is not None:
        return Checkpoint(newest.found, newest.passed_over)
    if newest.passed_over:
        raise CheckpointIncomplete(f"{path} holds no complete checkpoint: {' '.join(newest.passed_over)}")
    raise CheckpointError(f"{path} holds no checkpoint.", remedy=_REMEDY)
