"""The checks, in order, and how they are made: each by itself, so that one that goes wrong says so and the others go on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from infinity.doctor.compute import Compute, check_cuda, try_torch
from infinity.doctor.machine import Machine
from infinity.doctor.memory import (
    check_huge_pages,
    check_locked_memory,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from infinity.doctor.processor import check_adam_kernel, check_bf16, check_cores, check_cpu
from infinity.doctor.software import (
    check_adam_module,
    check_checksum_module,
    check_io_module,
    check_packages,
    check_python,
    check_system,
)
from infinity.doctor.storage import (
    Place,
    check_direct_io,
    check_disk,
    check_engine,
    check_file_system,
    check_registration,
    check_space,
    check_trim,
    try_place,
)
from infinity.doctor.verdict import Finding, Verdict, fails, note
from infinity.errors import InfinityError

T = TypeVar("T")

MACHINE_CHECKS: Mapping[str, Callable[[Machine], Verdict]] = {
    "system": check_system,
    "python": check_python,
    "packages": check_packages,
    "io module": check_io_module,
    "adam module": check_adam_module,
    "checksum module": check_checksum_module,
    "cpu": check_cpu,
    "bf16": check_bf16,
    "cores": check_cores,
    "adam kernel": check_adam_kernel,
    "memory": check_memory,
    "huge pages": check_huge_pages,
    "shared memory": check_shared_memory,
    "locked memory": check_locked_memory,
    "open files": check_open_files,
}
ENGINE_CHECKS: Mapping[str, Callable[[Place], Verdict]] = {
    "io engine": check_engine,
    "registration": check_registration,
}
PLACE_CHECKS: Mapping[str, Callable[[Place], Verdict]] = {
    "file system": check_file_system,
    "space": check_space,
    "direct io": check_direct_io,
    **ENGINE_CHECKS,
    "disk": check_disk,
    "trim": check_trim,
}
COMPUTE_CHECKS: Mapping[str, Callable[[Compute], Verdict]] = {"cuda": check_cuda}


def examine(machine: Machine, directories: Sequence[Path]) -> Iterator[Finding]:
    """Yield what every check finds, as soon as it is found: of the machine, of each directory, and of torch.

    torch comes last, because it takes longer than all the rest.
    """
    with ThreadPoolExecutor(max_workers=1) as executor:
        yield from _check(executor, MACHINE_CHECKS, machine, "")
        for directory in directories:
            verdict, place = _attempt(executor, partial(try_place, machine, directory))
            yield Finding("directory", str(directory), verdict)
            if place is not None:
                yield from _check(executor, PLACE_CHECKS, place, str(directory))
        if not directories:
            yield from _check_engine_alone(executor, machine)
        verdict, compute = _attempt(executor, partial(try_torch, machine))
        yield Finding("torch", "", verdict)
        if compute is not None:
            yield from _check(executor, COMPUTE_CHECKS, compute, "")


def _check_engine_alone(executor: Executor, machine: Machine) -> Iterator[Finding]:
    """Try the I/O engine where no directory was given; that it cannot be tried is no obstacle then."""
    scratch = tempfile.gettempdir()
    verdict, place = _attempt(executor, partial(try_place, machine, Path(scratch)))
    if place is None:
        verdict = note(verdict.found, needed="a directory to try it in", remedy="Give --nvme DIR.")
        yield Finding("io engine", scratch, verdict)
    else:
        yield from _check(executor, ENGINE_CHECKS, place, scratch)


def _check(executor: Executor, checks: Mapping[str, Callable[[T], Verdict]], thing: T, subject: str) -> Iterator[Finding]:
    for name, check in checks.items():
        future = executor.submit(check, thing)
        error = future.exception()
        yield Finding(name, subject, _wrong(error) if error else future.result())


def _attempt(executor: Executor, attempt: Callable[[], tuple[Verdict, T | None]]) -> tuple[Verdict, T | None]:
    future = executor.submit(attempt)
    error = future.exception()
    return (_wrong(error), None) if error else future.result()


def _wrong(error: BaseException) -> Verdict:
    """Return the verdict of a check that an error ended: a future carries it here, whatever its kind."""
    if isinstance(error, InfinityError):
        return fails(error.message, needed="", remedy=error.remedy, exit_code=error.exit_code)
    return fails(
        f"the check itself went wrong: {type(error).__name__}: {error}", needed="a check that ends",
        remedy="This is a bug or something that infinity does not know: please report this line.",
        exit_code=InfinityError.exit_code,
    )  # fmt: skip
