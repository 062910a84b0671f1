"""What a process that plays a rank is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Work:
    """A function that can be imported, its arguments, and the launcher's variables that make this process a rank."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """What one rank answers: a value, or the exception that ended its work."""

    rank: int
    value: Any = None
    error: str | None = None  # the class of the exception
    message: str = ""
    exit_code: int | None = None  # of an error of infinity
    traceback: str = ""
