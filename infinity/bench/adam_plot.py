"""A chart of the Adam benchmark: bytes per second of every kernel on every path, beside the bare loop's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from infinity.bench.adam import AdamResult
from infinity.bench.plots import new_figure

_INCHES_WIDE, _INCHES_HIGH = 8.0, 4.5
_GROUP_WIDTH = 0.8  # of the distance between two paths


def plot_adam(path: Path, results: Sequence[AdamResult]) -> None:
    """Write bars of GB/s with their spread, a panel for each thread count. Call `require_plotting` first."""
    counts = list(dict.fromkeys(result.threads for result in results))
    figure = new_figure(_INCHES_WIDE * len(counts), _INCHES_HIGH)
    for axis, threads in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts, strict=True):
        rows = [result for result in results if result.threads == threads]
        paths, kernels = list(dict.fromkeys(row.path for row in rows)), list(dict.fromkeys(row.kernel for row in rows))
        width = _GROUP_WIDTH / len(kernels)
        for place, kernel in enumerate(kernels):
            bars = [row for row in rows if row.kernel == kernel]
            at = [paths.index(row.path) + (place - (len(kernels) - 1) / 2) * width for row in bars]
            rates = [row.bytes_per_second / 1e9 for row in bars]
            axis.bar(at, rates, width, yerr=_spread(bars), label=kernel)
        axis.set_xticks(range(len(paths)), paths)
        axis.set_ylabel("GB/s, read and written")
        axis.set_title(f"Adam, {threads} threads")
        axis.legend()
    figure.savefig(path, format="png")


def _spread(bars: Sequence[AdamResult]) -> list[list[float]]:
    """Return how far the slowest and the fastest round are from the median, in GB/s."""
    scale = [row.bytes_per_second / row.parameters_per_second / 1e9 for row in bars]
    below = [(row.parameters_per_second - row.parameters_per_second_min) * one for row, one in zip(bars, scale, strict=True)]
    above = [(row.parameters_per_second_max - row.parameters_per_second) * one for row, one in zip(bars, scale, strict=True)]
    return [below, above]
