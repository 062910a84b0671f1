"""The consoles that everything is written to: standard output and standard error, without colours by guess."""

from __future__ import annotations

import errno

from rich.console import Console


class _Console(Console):
    """A console whose broken pipe is an error like any other; rich would end the program with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, "whoever read the output is gone")


def open_console(*, stderr: bool = False, quiet: bool = False, soft_wrap: bool = True, width: int | None = None) -> Console:
    """Return the console. With `soft_wrap` lines are as long as they are; `width` (columns) is for tables."""
    return _Console(stderr=stderr, quiet=quiet, soft_wrap=soft_wrap, width=width, highlight=False)
