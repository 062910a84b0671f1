"""How a rank joins the others, and what it tells them when it fails."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from types import TracebackType

import torch

from infinity.comm.group import Group
from infinity.comm.open_group import meet, open_group
from infinity.errors import InfinityError
from infinity.memory.limits import rss_bytes
from infinity.telemetry.recorder import Recorder


def join_ranks(device: torch.device, recorder: Recorder, resources: ExitStack) -> Group:
    """Open the group of this process's ranks; `resources` leaves it: after an exception the others are told.

    Raises ConfigError and CommError.
    """
    group = open_group(meet(os.environ), device=device, recorder=recorder, resident_bytes=rss_bytes)

    def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        reason = error or sys.exc_info()[1]  # the latter: a `finally` of the user's closes the engine
        if reason is None:
            group.close()
        else:
            group.fail(reason_words(reason))

    resources.push(leave)
    return group


def leave_at_exit(group: Group) -> None:
    """The program ends without having closed its engine: after an exception the others are told of it."""
    reason: BaseException | None = getattr(sys, "last_value", None)
    if reason is not None:
        group.fail(reason_words(reason))


def reason_words(error: BaseException) -> str:
    """Return what other ranks are told of an error."""
    return str(error) if isinstance(error, InfinityError) else f"{type(error).__name__}: {error}"
