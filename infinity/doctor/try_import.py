"""Run as a program: load the module argv[1]."""

from __future__ import annotations

import sys
from importlib import import_module

from infinity.doctor.answers import ModuleAnswer
from infinity.doctor.trials import give_answer


def load(name: str) -> ModuleAnswer:
    """Load the module and return where it came from."""
    return ModuleAnswer(str(import_module(name).__file__))


if __name__ == "__main__":
    give_answer(lambda: load(sys.argv[1]))
