"""What can crash, hang or fail to load is tried out in a process of its own, which answers with one line of JSON.

A library that is broken may end the whole process (a missing instruction, a driver that does not fit), and a network disk
that is gone blocks whoever touches it. So no check imports torch or a native module, or touches the directory of a user,
itself.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from infinity.errors import InfinityError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception)\b")
_SECONDS = 120  # torch with CUDA from a cold network disk takes half of that


@dataclass(frozen=True, slots=True)
class Refusal:
    """An error of infinity, carried over from the process that it was raised in."""

    message: str
    remedy: str
    exit_code: int
    errno: int


@dataclass(frozen=True, slots=True)
class Trial:
    """How a trial ended: with an `answer`, with a `refusal` by infinity, or else with a `failure` in words."""

    answer: Mapping[str, Any] | None = None
    refusal: Refusal | None = None
    failure: str = ""


RunTrial = Callable[..., Trial]  # (module, *arguments)


def run_trial(module: str, *arguments: str, seconds: float = _SECONDS) -> Trial:
    """Run a module of this room as a program that ends with `give_answer`, and return how it ended.

    It finds modules where this process finds them, so that it loads what training would load.
    """
    program = f"import runpy, sys; sys.path[:] = {sys.path!r}; runpy.run_module({module!r}, run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    try:
        output, complaints = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # not waited for: where a disk blocks it, it cannot even die
        return Trial(failure=f"no answer in {seconds:.0f} seconds")
    return _read_answer(output) if process.returncode == 0 else Trial(failure=_reason(process.returncode, complaints))


def give_answer(work: Callable[[], DataclassInstance]) -> None:
    """Do the work of a trial and write its result, or the error of infinity that ended it, as the last line of stdout."""
    try:
        line: dict[str, object] = {"answer": asdict(work())}
    except InfinityError as error:
        line = {"refusal": asdict(refusal_of(error))}
    sys.stdout.write(f"\n{json.dumps(line)}\n")


def refusal_of(error: InfinityError) -> Refusal:
    """Return what is carried over of an error."""
    return Refusal(error.message, error.remedy, error.exit_code, getattr(error, "errno", 0) or 0)


def _read_answer(output: str) -> Trial:
    line = json.loads(output.splitlines()[-1])
    refusal = line.get("refusal")
    return Trial(answer=line.get("answer"), refusal=Refusal(**refusal) if refusal else None)


def _reason(returncode: int, complaints: str) -> str:
    """Return the signal that ended a process, or the error in what it complained with: its message may have lines more."""
    if returncode < 0:
        return f"ended by {signal.Signals(-returncode).name}"
    lines = [line.strip() for line in complaints.splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [f"exit code {returncode}"])[-1]
