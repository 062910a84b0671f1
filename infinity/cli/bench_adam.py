"""`infinity bench adam`: options onto settings, progress, the table and the files."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from infinity.cli.bench_outputs import check_outputs, writing
from infinity.cli.failures import failures_explained
from infinity.cli.options import parse_path, whole_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from infinity.bench.adam import AdamReport, AdamResult

_Parameters = Annotated[
    str | None, typer.Option("--parameters", metavar="N", help="Such as 1e8. Default: 2e8, or what fits into memory.")
]
_Kernel = Annotated[str, typer.Option("--kernel", metavar="all|avx512|avx2|scalar", help="Instruction set.")]
_Threads = Annotated[
    list[int] | None, typer.Option("--threads", metavar="N", help="Repeatable. Default: as many as training uses.")
]
_Rounds = Annotated[int, typer.Option("--rounds", metavar="N", help="Of all contenders in turn.")]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.", parser=parse_path)]
_Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw them. Needs matplotlib.", parser=parse_path)
]


def adam(
    parameters: _Parameters = None,
    kernel: _Kernel = "all",
    threads: _Threads = None,
    rounds: _Rounds = 9,
    json: _Json = None,
    plot: _Plot = None,
) -> None:
    """Measure the optimizer's kernels against torch's AdamW and against a bare loop over the same bytes."""
    with failures_explained():
        count = None if parameters is None else whole_number(parameters, name="--parameters")
        check_outputs(json, plot)
        # Loads torch: not before everything cheap was checked.
        from rich.console import Console

        from infinity.bench.adam import AdamSettings, run_adam_benchmark

        console = Console(highlight=False, soft_wrap=True)
        settings = AdamSettings(num_parameters=count, kernel=kernel, threads=tuple(threads or ()), num_rounds=rounds)
        with console.status("Preparing") as status:
            report = run_adam_benchmark(settings, on_progress=status.update)
        _show(console, report)
        if json is not None:
            from infinity.bench.provenance import provenance

            origin = provenance(["infinity", *sys.argv[1:]], packages=("torch", "numpy"))
            with writing("--json", json):
                json.write_text(json_module.dumps({"provenance": origin, **report.as_json()}, indent=2) + "\n")
        if plot is not None:
            from infinity.bench.adam_plot import plot_adam

            with writing("--plot", plot):
                plot_adam(plot, report.results)


def _show(console: Console, report: AdamReport) -> None:
    from itertools import groupby

    from infinity.byte_sizes import format_bytes

    cache = "unknown" if report.last_level_cache_bytes is None else format_bytes(report.last_level_cache_bytes)
    console.print(
        f"{report.num_parameters:,} parameters, {format_bytes(report.working_set_bytes)} at the least (last level of cache: "
        f"{cache}), medians of {report.num_rounds} rounds. The limit is a bare loop that reads and writes the same bytes of "
        f"the same buffers and computes nothing."
    )
    for (path, threads), results in groupby(report.results, key=lambda result: (result.path, result.threads)):
        console.print(_table(f"{path}, {threads} {'thread' if threads == 1 else 'threads'}", list(results)))
    for note in report.notes:
        console.print(note)


def _table(title: str, results: Sequence[AdamResult]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("kernel", no_wrap=True)
    for name in ("M params/s", "from - to", "GB/s", "of limit", "of fused"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limited by", no_wrap=True)
    for result in results:
        table.add_row(*_cells(result))
    return table


def _cells(result: AdamResult) -> tuple[str, ...]:
    slowest, fastest = result.parameters_per_second_min / 1e6, result.parameters_per_second_max / 1e6
    fused = result.ratio_to_torch_fused
    return (
        result.kernel,
        f"{result.parameters_per_second / 1e6:.0f}",
        f"{slowest:.0f} - {fastest:.0f}",
        f"{result.bytes_per_second / 1e9:.1f}",
        f"{result.ratio_to_limit:.3f}",
        "" if fused is None else f"{fused:.3f}",
        "" if result.bound is None else result.bound.value,
    )
