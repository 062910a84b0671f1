"""The files that benchmarks write at the end: checked before anything is measured, and there whole or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infinity.errors import ConfigError, StorageError


def check_outputs(json_: Path | None, plot: Path | None) -> None:
    """Raise ConfigError or StorageError where a file cannot be written at the end, PlatformError where none can be drawn."""
    for option, path in (("--json", json_), ("--plot", plot)):
        if path is not None:
            require_writable(option, path)
    if plot is not None:
        from infinity.bench.plots import require_plotting

        require_plotting(plot)


def require_writable(option: str, path: Path) -> None:
    """Find out by trying whether `path` can be written at the end; nothing is left behind.

    Raises ConfigError for something that is no file and for a missing directory, StorageError where this user may not write.
    """
    with _explained(option, path):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{option}: {path} exists and is not a file.", remedy="Give the name of a file.")
        if not path.parent.is_dir():
            raise ConfigError(f"{option}: there is no directory {path.parent}.", remedy="Make it, or give another file.")
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent, prefix=".infinity-check-").close()


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Write `path` in the block. Raises StorageError when that fails; half of a new file does not stay."""
    is_new = not path.exists()
    try:
        with _explained(option, path):
            yield
    except StorageError:
        if is_new:
            path.unlink(missing_ok=True)
        raise


@contextmanager
def _explained(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{option}: {path} cannot be written: {error.strerror or error}.",
            remedy="Give a file in a directory of your own that has room.",
            errno=error.errno or 0,
        ) from error
