"""Whether a process that says nothing works: what keeps the watch from calling a busy rank dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from infinity.comm.busy import is_running


def eventually(says: Callable[[], bool]) -> bool:
    """Ask until it says so, for a few seconds: a process needs a moment to begin, and to stop."""
    for _ in range(500):
        if says():
            return True
        time.sleep(0.01)
    return False


def test_a_process_that_computes_runs_and_one_that_is_stopped_does_not() -> None:
    """A loop in Python holds its lock and beats no more: it runs. Stopped by a signal, or gone, it does not."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            assert eventually(lambda: is_running(child.pid))
            os.kill(child.pid, signal.SIGSTOP)
            assert eventually(lambda: not is_running(child.pid))
        finally:
            child.kill()
    assert not is_running(child.pid)
