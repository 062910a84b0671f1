"""How a failure ends: one sentence and a remedy on stderr, and the error's own exit code."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape

from infinity.cli.console import open_console
from infinity.errors import InfinityError, StorageError
from infinity.launch.error_file import record_error

_INTERRUPTED = 130  # 128 + SIGINT
_BROKEN_PIPE = 141  # 128 + SIGPIPE, as of programs that the signal ends
_UNEXPECTED = 1


@contextmanager
def failures_explained() -> Iterator[None]:
    """Turn every failure inside the block into words and SystemExit; a traceback goes to a file, never to the screen.

    A standard output that whoever read it has closed (`| head`) ends the program without a word, a full one with an error.
    """
    try:
        yield
        _flush()
    except InfinityError as error:
        record_error(error.message, error.remedy)
        say_error(error.message, error.remedy)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as interrupt:
        _say("Stopped.")
        raise SystemExit(getattr(interrupt, "exit_code", _INTERRUPTED)) from None
    except BrokenPipeError:
        _discard(sys.stdout.fileno())
        raise SystemExit(_BROKEN_PIPE) from None
    except Exception as error:  # noqa: BLE001 - the last place that can say something about it
        if isinstance(error, OSError) and _refuses_output():
            _discard(sys.stdout.fileno())
            say_error(f"Standard output cannot be written: {error.strerror}.", "Free space, or redirect it.")
            raise SystemExit(StorageError.exit_code) from None
        message = f"{type(error).__name__}: {error}"
        remedy = f"This is a bug or something that infinity does not know. The traceback is in {_keep_traceback()}."
        record_error(message, remedy, callstack=traceback.format_exc())
        say_error(message, remedy)
        raise SystemExit(_UNEXPECTED) from None


def say_error(message: str, remedy: str) -> None:
    """Show an error and what to do about it on standard error."""
    _say(f"[bold red]error:[/] {escape(message)}", escape(remedy))


def _say(*lines: str) -> None:
    console = open_console(stderr=True)
    try:
        for line in filter(None, lines):
            console.print(line)
    except OSError:  # then the exit code has to do
        _discard(sys.stderr.fileno())


def _refuses_output() -> bool:
    """Return whether standard output cannot be written, found out by an empty line."""
    try:
        _flush("\n")
    except OSError:
        return True
    return False


def _flush(text: str = "") -> None:
    if sys.stdout is not None:  # the shell may have closed it (>&-)
        sys.stdout.write(text)
        sys.stdout.flush()


def _discard(descriptor: int) -> None:
    """Let what is left in the buffers go nowhere: Python flushes them at exit, and would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _keep_traceback() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="infinity-traceback-", suffix=".txt", delete=False) as file:
        traceback.print_exc(file=file)
    return file.name
