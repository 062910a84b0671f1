"""Checks of what is installed: Python, the packages that infinity requires, and its native modules."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterable, Iterator

from infinity.doctor.machine import Machine
from infinity.doctor.remedies import Package, install
from infinity.doctor.verdict import Verdict, fails, missing, note, ok

LEAST_PYTHON = (3, 11)
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9][0-9.]*)")
_AGAIN = "install infinity again from its source (`pip install .` there), or install its wheel for this Python"


def check_system(machine: Machine) -> Verdict:
    """Which system this is: the words of every remedy are its own."""
    kernel = (machine.text("proc/sys/kernel/osrelease") or "of unknown version").strip()
    surroundings = machine.surroundings
    return ok(f"{surroundings.distribution}, kernel {kernel}, {surroundings.container.value}", needed="Linux")


def check_python(_: Machine, version: tuple[int, ...] = sys.version_info[:3]) -> Verdict:
    """Which Python this is, and whether it is new enough."""
    needed = f"Python {'.'.join(map(str, LEAST_PYTHON))} or newer"
    found = f"{'.'.join(map(str, version))}, {platform.machine()}, {sys.executable}"
    if version[:2] < LEAST_PYTHON:
        return fails(found, needed=needed, remedy="Make a virtual environment with a newer Python.")
    return ok(found, needed=needed)


def check_packages(machine: Machine) -> Verdict:
    """Whether every package that infinity requires is there and new enough; none is loaded."""
    if machine.packages.required is None:
        return note(
            "infinity runs from its source and is not installed, so that its requirements are not known here",
            needed="the packages that pyproject.toml names", remedy="Install it: `pip install .`",
        )  # fmt: skip
    installed: list[str] = []
    absent: list[str] = []
    old: dict[str, str] = {}  # what is required, and what is installed instead
    for name, least in _at_least(machine.packages.required):
        required, version = f"{name}>={least}", machine.packages.version(name)
        if version is None:
            absent.append(required)
            continue
        installed.append(f"{name} {version}")
        if numbers(version) < numbers(least):
            old[required] = installed[-1]
    wanted = [*absent, *old]
    remedy = f"pip install {' '.join(map(repr, wanted))}"
    if absent:
        return missing(f"without {', '.join(absent)}", needed=", ".join(wanted), remedy=remedy)
    if old:
        return fails(", ".join(old.values()), needed=", ".join(wanted), remedy=remedy)
    return ok(", ".join(installed), needed="what infinity's metadata requires")


def check_io_module(machine: Machine) -> Verdict:
    """Whether the io_uring engine was built; without it threads do the I/O."""
    needed = "infinity._aio, for I/O through io_uring"
    trouble = _trouble_loading(machine, "infinity._aio")
    if not trouble:
        return ok("infinity._aio loads", needed=needed)
    remedy = f"{install(Package.LIBURING, machine.surroundings)}; then {_AGAIN}."
    return note(f"{trouble}; threads do the I/O instead", needed=needed, remedy=remedy)


def check_adam_module(machine: Machine) -> Verdict:
    """Whether the CPU's Adam was built; nothing takes its place."""
    return _compiled(machine, "infinity._cpu_adam", "for the optimizer's step on the CPU", "")


def check_checksum_module(machine: Machine) -> Verdict:
    """Whether the checksums of swap files were built; nothing takes their place, but they may be switched off."""
    return _compiled(machine, "infinity._crc32c", "for the checksums of what is on NVMe", " Or train with `--no-checksums`.")


def _compiled(machine: Machine, name: str, purpose: str, way_out: str) -> Verdict:
    needed, trouble = f"{name}, {purpose}", _trouble_loading(machine, name)
    if not trouble:
        return ok(f"{name} loads", needed=needed)
    remedy = f"{install(Package.COMPILER, machine.surroundings)}; then {_AGAIN}.{way_out}"
    judge = fails if machine.has_module(name) else missing
    return judge(trouble, needed=needed, remedy=remedy)


def numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version, without what follows it and without zeros at its end: "2.13.0+cpu" is (2, 13)."""
    match = re.match(r"[0-9.]+", version)
    parts = [int(part) for part in match[0].split(".") if part] if match else []
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)


def _at_least(requirements: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield name and least version of what is required without extras."""
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is not None and "extra ==" not in requirement:
            yield match[1], match[2]


def _trouble_loading(machine: Machine, name: str) -> str:
    """Return in words why a module does not load; "" where it does."""
    if not machine.has_module(name):
        return f"{name} was not built"
    trial = machine.run_trial("infinity.doctor.try_import", name)
    return "" if trial.answer is not None else f"{name} does not load: {trial.failure}"
