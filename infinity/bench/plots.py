"""Draws the results of a benchmark into a PNG file, with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infinity.bench.nvme_jobs import Traffic
from infinity.bench.nvme_results import Row, best_rows
from infinity.byte_sizes import format_bytes
from infinity.errors import ConfigError, PlatformError

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None

_INCHES_WIDE, _INCHES_HIGH = 5.0, 4.0


def require_plotting(path: Path) -> None:
    """Raise PlatformError where matplotlib is missing, and ConfigError for a file that is not called .png."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot: {path} does not end in .png.", remedy="Give for example --plot nvme.png.")
    if Figure is None:
        raise PlatformError(
            "--plot: matplotlib is not installed.", remedy="pip install 'infinity-train[plot]', or leave --plot out."
        )


def new_figure(inches_wide: float, inches_high: float) -> Any:
    """Return an empty figure of matplotlib's that needs no screen. Call `require_plotting` first."""
    return Figure(figsize=(inches_wide, inches_high), layout="constrained")


def plot_nvme(path: Path, rows: Sequence[Row]) -> None:
    """Write a heat map of block size x queue depth for each engine and kind of traffic, and a chart of the best of each.

    `rows` are of infinity's engines and of fio. Call `require_plotting` first.
    """
    engines, ops = (list(dict.fromkeys(values)) for values in ([row.engine for row in rows], [row.op for row in rows]))
    figure = new_figure(_INCHES_WIDE * (len(ops) + 1), _INCHES_HIGH * len(engines))
    grid = figure.add_gridspec(len(engines), len(ops) + 1)
    for line, engine in enumerate(engines):
        for column, op in enumerate(ops):
            shown = [row for row in rows if (row.op, row.engine) == (op, engine)]
            _draw_heat_map(figure.add_subplot(grid[line, column]), shown, f"{op}, {engine}, GB/s")
    _draw_best(figure.add_subplot(grid[:, -1]), rows)
    figure.savefig(path, format="png")


def heat_map(rows: Sequence[Row]) -> tuple[list[int], list[int], list[list[float]]]:
    """Return block sizes, queue depths, and GB/s by block (outer) and depth (inner); NaN where none was measured."""
    blocks, depths = sorted({row.block_bytes for row in rows}), sorted({row.queue_depth for row in rows})
    rates = {(row.block_bytes, row.queue_depth): row.bytes_per_second / 1e9 for row in rows}
    return blocks, depths, [[rates.get((block, depth), float("nan")) for depth in depths] for block in blocks]


def _draw_heat_map(axis: Any, rows: Sequence[Row], title: str) -> None:
    blocks, depths, rates = heat_map(rows)
    axis.imshow(rates, aspect="auto", origin="lower", vmin=0.0)
    axis.set_title(title)
    axis.set_xlabel("queue depth")
    axis.set_ylabel("block")
    axis.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axis.set_yticks(range(len(blocks)), [format_bytes(block) for block in blocks])
    for row, values in enumerate(rates):
        for column, value in enumerate(values):
            axis.text(
                column, row, f"{value:.2f}", ha="center", va="center", color="white", bbox={"color": "black", "alpha": 0.4}
            )


def _draw_best(axis: Any, rows: Sequence[Row]) -> None:
    engines = list(dict.fromkeys(row.engine for row in rows))
    width = 0.8 / len(engines)
    for index, engine in enumerate(engines):
        best = best_rows([row for row in rows if row.engine == engine])
        places = [list(Traffic).index(traffic) + (index - (len(engines) - 1) / 2) * width for traffic in best]
        rates = [row.bytes_per_second / 1e9 for row in best.values()]
        below = [(row.bytes_per_second - row.bytes_per_second_min) / 1e9 for row in best.values()]
        above = [(row.bytes_per_second_max - row.bytes_per_second) / 1e9 for row in best.values()]
        axis.bar(places, rates, width, yerr=[below, above], capsize=3, label=engine)
    axis.set_xticks(range(len(Traffic)), [traffic.value for traffic in Traffic])
    axis.set_ylabel("GB/s")
    axis.set_title("best of each kind, median, least and greatest")
    axis.legend()
