"""How a rank's process ends after a failure: at once, without the shutdown of Python."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def failed_ranks_leave_at_once() -> Iterator[None]:
    """Let a rank among several that exits with a failure inside the block end with that code, whatever its threads do.

    After a failure a thread may wait inside gloo for a rank that is gone. Where it wakes up while Python shuts down, the
    process would abort, with a code that says nothing. Everything that has to be undone is undone before.
    """
    try:
        yield
    except SystemExit as ended:
        if isinstance(ended.code, int) and ended.code and os.environ.get("WORLD_SIZE", "1") != "1":
            for stream in filter(None, (sys.stdout, sys.stderr)):
                with suppress(OSError, ValueError):  # closed, or nobody reads it any more
                    stream.flush()
            os._exit(ended.code)
        raise
