"""The files that benchmarks write at the end, checked before anything is measured."""

from __future__ import annotations

from pathlib import Path

from infinity.errors import ConfigError


def check_outputs(json_: Path | None, plot: Path | None) -> None:
    """Raise ConfigError for a file that cannot be written at the end, PlatformError where plots cannot be drawn."""
    for option, path in (("--json", json_), ("--plot", plot)):
        if path is not None and path.exists() and not path.is_file():
            raise ConfigError(f"{option}: {path} exists and is not a file.", remedy="Give the name of a file.")
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{option}: there is no directory {path.parent}.", remedy="Make it, or give another file.")
    if plot is not None:
        from infinity.bench.plots import require_plotting

        require_plotting(plot)
