"""Faults below an engine: what its own calls to the system give, call by call, counted from the opening of the engine."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from aio_cases import open_kind

from infinity.aio.engine import Engine


@dataclass(frozen=True)
class Fails:
    """The call moves nothing and fails with `number`."""

    number: int


@dataclass(frozen=True)
class Moves:
    """The call moves no more than `num_bytes`."""

    num_bytes: int


Effect = Fails | Moves


class Calls:
    """Counts calls, and lets those with an effect meet it."""

    def __init__(self, effects: Mapping[int, Effect]) -> None:
        self.effects = effects
        self.num_calls = 0

    def __call__(self, move: Any, buffer: Any) -> int:
        effect = self.effects.get(self.num_calls)
        self.num_calls += 1
        if isinstance(effect, Fails):
            raise OSError(effect.number, os.strerror(effect.number))
        view = memoryview(buffer).cast("B")
        return move(view if effect is None else view[: effect.num_bytes]) if effect != Moves(0) else 0


def open_above_faults(kind: str, effects: Mapping[int, Effect], monkeypatch: pytest.MonkeyPatch, **sizes: int) -> Engine:
    """Open an engine whose calls meet the effects; io_uring has a hook for it, where results are replaced after the call."""
    if kind == "uring":
        results = {
            number: -effect.number if isinstance(effect, Fails) else effect.num_bytes for number, effect in effects.items()
        }
        return open_kind(kind, faults=results, **sizes)
    calls = Calls(effects)
    if kind == "threads":
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, _positioned(calls, getattr(os, name)))
    else:

        class FaultyFile(io.FileIO):
            def readinto(self, buffer: Any) -> int:
                return calls(super().readinto, buffer)

            def write(self, buffer: Any) -> int:
                return calls(super().write, buffer)

        monkeypatch.setattr(
            "aiofiles.threadpool.sync_open", lambda file, mode, closefd, **_: FaultyFile(file, mode, closefd=closefd)
        )
    return open_kind(kind, **sizes)


def _positioned(calls: Calls, real: Any) -> Any:
    return lambda fd, buffers, offset: calls(lambda view: real(fd, [view], offset), buffers[0])
