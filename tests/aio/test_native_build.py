"""The native module is built where liburing is found, and agrees with Python on the numbers that both use."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from infinity.aio.failures import END_OF_FILE
from infinity.aio.request import RequestState

BUILDER = Path(__file__).parents[2] / "csrc" / "aio" / "build.py"


def test_without_a_compiler_or_liburing(monkeypatch: pytest.MonkeyPatch) -> None:
    """C21, C22: the builder can be imported, and finds no liburing, where nothing compiles."""
    monkeypatch.setenv("CC", "no-such-compiler")
    assert runpy.run_path(str(BUILDER))["find_liburing"]() is None
    monkeypatch.setenv("CC", "false")
    assert runpy.run_path(str(BUILDER))["find_liburing"]() is None


def test_states_and_codes_agree() -> None:
    """The states of a request and the code of the end of a file are the same numbers in C and in Python."""
    lib = pytest.importorskip("infinity._aio", reason="built without liburing").lib
    assert {state.name: getattr(lib, f"AIO_{state.name}") for state in RequestState} == dict(RequestState.__members__)
    assert lib.AIO_END_OF_FILE == END_OF_FILE
