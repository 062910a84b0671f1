"""How a failure ends: one sentence and a remedy on stderr, and the error's own exit code."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from infinity.errors import InfinityError

_INTERRUPTED = 130  # 128 + SIGINT
_UNEXPECTED = 1


@contextmanager
def failures_explained() -> Iterator[None]:
    """Turn every failure inside the block into words and SystemExit; a traceback goes to a file, never to the screen."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        yield
    except InfinityError as error:
        console.print(f"[bold red]error:[/] {escape(error.message)}")
        if error.remedy:
            console.print(escape(error.remedy))
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt as interrupt:
        console.print("Stopped.")
        raise SystemExit(getattr(interrupt, "exit_code", _INTERRUPTED)) from None
    except BrokenPipeError:  # whoever read the output is gone; a flush at exit would fail once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(_UNEXPECTED) from None
    except Exception as error:  # noqa: BLE001 - the last place that can say something about it
        console.print(f"[bold red]error:[/] {escape(f'{type(error).__name__}: {error}')}")
        console.print(f"This is a bug or something that infinity does not know. The traceback is in {_keep_traceback()}.")
        raise SystemExit(_UNEXPECTED) from None


def _keep_traceback() -> str:
    with tempfile.NamedTemporaryFile("w", prefix="infinity-traceback-", suffix=".txt", delete=False) as file:
        traceback.print_exc(file=file)
    return file.name
