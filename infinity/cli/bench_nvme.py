"""`infinity bench nvme`: options onto settings, live progress, the table and the files."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinity.cli.bench_outputs import check_outputs, require_writable, writing
from infinity.cli.failures import failures_explained
from infinity.cli.options import parse_path
from infinity.errors import ConfigError

if TYPE_CHECKING:
    from infinity.bench.nvme_jobs import NvmeSettings
    from infinity.bench.nvme_results import Report
    from infinity.train.stopping import StopRequest

_TUNE_SECONDS = 27.0  # of the whole command
_TUNED_NAME = "infinity-nvme"
_OPS = ("read", "write", "mixed", "all")

_Nvme = Annotated[
    list[Path], typer.Option("--nvme", metavar="DIR", help="Directory on the disk; repeatable.", parser=parse_path)
]
_Size = Annotated[
    str | None, typer.Option("--size", metavar="SIZE", help="Of the file in each. Default: 4GiB, or what fits.")
]
_Engine = Annotated[
    str, typer.Option("--engine", metavar="auto|uring|threads|buffered|all", help="What does the reading and writing.")
]
_Op = Annotated[str, typer.Option("--op", metavar="read|write|mixed|all", help="What is measured.")]
_BlockSize = Annotated[
    list[str] | None,
    typer.Option("--block-size", metavar="SIZE", help="Bytes a block; repeatable. Default: 4KiB 1MiB 4MiB."),
]
_QueueDepth = Annotated[
    list[int] | None,
    typer.Option("--queue-depth", metavar="N", help="Blocks in flight; repeatable. Default: 16 32."),
]
_Seconds = Annotated[float | None, typer.Option("--seconds", metavar="S", help="Timed, of each line. Default: 1.25.")]
_LongRun = Annotated[
    float | None, typer.Option("--long-run", metavar="S", help="Of writing without a pause at the end. Default: 6.")
]
_Tune = Annotated[bool, typer.Option("--tune", help="Find the best settings instead, and write them as a configuration.")]
_Against = Annotated[str | None, typer.Option("--against", metavar="fio", help="Run the same jobs with fio, too.")]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results there.", parser=parse_path)]
_Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw them. Needs matplotlib.", parser=parse_path)
]


def nvme(
    nvme: _Nvme,
    size: _Size = None,
    engine: _Engine = "auto",
    op: _Op = "all",
    block_size: _BlockSize = None,
    queue_depth: _QueueDepth = None,
    seconds: _Seconds = None,
    long_run: _LongRun = None,
    tune: _Tune = False,
    against: _Against = None,
    json_: _Json = None,
    plot: _Plot = None,
) -> None:
    """Measure a disk through the engines that training uses: bandwidth, operations, latency, CPU time."""
    end = time.perf_counter() + _TUNE_SECONDS
    flags = locals()
    with failures_explained(), ExitStack() as resources:
        from infinity.bench.nvme_jobs import jobs_of
        from infinity.bench.nvme_places import check_places
        from infinity.train.stopping import stop_request

        stopping = resources.enter_context(stop_request())
        settings = _settings(flags)
        check_outputs(json_, plot)
        if tune:
            _tune(settings, end, json_, plot, resources, stopping)
            return
        fio_program = _find_fio(against)
        jobs = jobs_of(settings)
        places = check_places(settings, jobs, resources)
        # Loads torch: not before everything cheap was checked.
        from infinity.bench.nvme_run import run
        from infinity.cli.bench_display import open_observer, show_report

        stopping.raise_again()
        with open_observer() as observer:
            report = run(settings, jobs, places, fio_program, observer)
        show_report(report)
        _write(report, {}, json_, plot)


def _tune(
    settings: NvmeSettings,
    end: float,
    json_: Path | None,
    plot: Path | None,
    resources: ExitStack,
    stopping: StopRequest,
) -> None:
    from infinity.bench.nvme_places import check_places
    from infinity.bench.nvme_tune import candidate_jobs, config_section, tuning_settings

    require_writable("--tune", _free_name())
    settings = tuning_settings(settings)
    places = check_places(settings, candidate_jobs(), resources)
    from infinity.bench.nvme_tuning import tune
    from infinity.cli.bench_display import open_observer, show_report, show_tuned

    stopping.raise_again()
    with open_observer() as observer:
        tuned, report = tune(settings, places, end, observer)
    section = config_section(tuned.best, [facts.path for facts in places.directories])
    show_report(report)
    path = _free_name()
    with writing("--tune", path), path.open("x") as file:
        file.write(json.dumps(section, indent=2) + "\n")
    show_tuned(section, path)
    _write(report, {"config": section}, json_, plot)


def _settings(flags: Mapping[str, Any]) -> NvmeSettings:
    """Return what the options mean. Raises ConfigError for unknown values and for options that contradict each other."""
    from infinity.bench.nvme_jobs import NvmeSettings, Traffic
    from infinity.byte_sizes import parse_bytes

    if flags["tune"]:
        fixed = ("block_size", "queue_depth", "seconds", "long_run", "against")
        given = [f"--{name.replace('_', '-')}" for name in fixed if flags[name] is not None]
        given += ["--op"] if flags["op"] != "all" else []
        if given:
            raise ConfigError(f"--tune contradicts {given[0]}: it tries out several.", remedy=f"Leave {given[0]} out.")
    if flags["op"] not in _OPS:
        raise ConfigError(f"--op: {flags['op']!r} is not known.", remedy=f"Known: {', '.join(_OPS)}.")
    chosen: dict[str, Any] = {
        "size_bytes": flags["size"] and parse_bytes(flags["size"], name="--size"),
        "traffics": tuple(Traffic) if flags["op"] == "all" else (Traffic(flags["op"]),),
        "block_bytes": flags["block_size"] and tuple(parse_bytes(text, name="--block-size") for text in flags["block_size"]),
        "queue_depths": flags["queue_depth"] and tuple(flags["queue_depth"]),
        "seconds": flags["seconds"],
        "long_run_seconds": flags["long_run"],
    }
    given_only = {name: value for name, value in chosen.items() if value is not None}
    return NvmeSettings(directories=tuple(flags["nvme"]), engine=flags["engine"], **given_only)


def _find_fio(against: str | None) -> str | None:
    from infinity.bench.fio import find_fio

    if against not in (None, "fio"):
        raise ConfigError(f"--against: {against!r} is not known.", remedy="Known: fio.")
    return find_fio() if against else None


def _write(report: Report, more: Mapping[str, object], json_: Path | None, plot: Path | None) -> None:
    if json_ is not None:
        from infinity.bench.nvme_results import as_json
        from infinity.bench.provenance import provenance

        content = {**as_json(report, provenance(["infinity", *sys.argv[1:]])), **more}
        with writing("--json", json_):
            json_.write_text(json.dumps(content, indent=2) + "\n")
    if plot is not None:
        from infinity.bench.plots import plot_nvme

        with writing("--plot", plot):
            plot_nvme(plot, [*(result.row for result in report.results), *report.against])


def _free_name() -> Path:
    """Return the name of a file that is not there, in the working directory."""
    path, number = Path(f"{_TUNED_NAME}.json"), 1
    while os.path.lexists(path):
        number += 1
        path = Path(f"{_TUNED_NAME}-{number}.json")
    return path
