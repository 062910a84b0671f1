"""`infinity doctor`: can training run on this machine, what holds it back, and what to do about it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from infinity.cli.console import open_console
from infinity.cli.failures import failures_explained
from infinity.cli.options import parse_path

if TYPE_CHECKING:
    from rich.console import Console

    from infinity.doctor.verdict import Finding, Report

_Nvme = Annotated[
    list[Path] | None,
    typer.Option("--nvme", help="Directory to try as a run would use it; repeatable.", metavar="DIR", parser=parse_path),
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]

_STYLES = {"ok": "green", "note": "yellow", "missing": "bold red", "fails": "bold red"}
_STATE_WIDTH, _NAME_WIDTH = 9, 17


def doctor(nvme: _Nvme = None, as_json: _Json = False) -> None:
    """Check what training needs of this machine and of each --nvme DIR. Exit code 0: training can run."""
    with failures_explained():
        from infinity.doctor.examine import examine
        from infinity.doctor.machine import this_machine
        from infinity.doctor.verdict import Report
        from infinity.store.checks import require_distinct

        directories = list(dict.fromkeys(nvme or ()))
        require_distinct([path for path in directories if os.path.isdir(path)])  # training refuses it, too
        console = open_console(quiet=as_json)
        report = Report(tuple(_shown(examine(this_machine(), directories), console)))
        console.print(Text(f"\n{summary_of(report)}", style="bold"))
        if as_json:
            typer.echo(json.dumps(report.as_json(), indent=2))
    raise typer.Exit(report.exit_code)


def _shown(findings: Iterable[Finding], console: Console) -> Iterator[Finding]:
    """Yield the findings and print each as it comes; those of a directory stand below its name."""
    subject = ""
    for finding in findings:
        if finding.subject != subject:
            console.print()
            console.print(Text(finding.subject or "Compute", style="bold"))
        subject = finding.subject
        for line in lines_of(finding):
            console.print(line)
        yield finding


def lines_of(finding: Finding) -> Iterator[Text]:
    """Yield a finding: what was found in one line and, where that is not as it should be, what is needed and what to do."""
    verdict = finding.verdict
    state = Text(f"{verdict.state.value:<{_STATE_WIDTH}}", style=_STYLES[verdict.state.value])
    yield state + Text(f"{finding.name:<{_NAME_WIDTH}}{verdict.found}")
    if verdict.remedy:
        indent = " " * (_STATE_WIDTH + _NAME_WIDTH)
        if verdict.needed:
            yield Text(f"{indent}needed: {verdict.needed}", style="dim")
        yield Text(f"{indent}{verdict.remedy}")


def summary_of(report: Report) -> str:
    """Return the last line."""
    if not report.obstacles:
        return "Training can run."
    names = ", ".join(f"{one.name} {one.subject}".rstrip() for one in report.obstacles)
    return f"Training cannot run: {names}."
