"""A command for the launcher without torch: does what its first word says, as the rank that its environment names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from infinity.cli.failures import failures_explained
from infinity.errors import CommError, StorageError
from infinity.train.stopping import stop_request

RANK = int(os.environ["RANK"])
CHILD = [sys.executable, "-c", "import time; time.sleep(60)"]


def leave(directory: Path, text: str) -> None:
    """Say that this rank came so far."""
    (directory / f"rank{RANK}").write_text(text)


def wait_for(directory: Path, rank: int) -> None:
    """Wait until another rank came so far."""
    while not (directory / f"rank{rank}").exists():
        time.sleep(0.01)


def tell(directory: Path) -> None:
    """Say what the environment holds, also on both outputs."""
    leave(directory, "\n".join(f"{name}={value}" for name, value in os.environ.items()))
    print(f"out of {RANK}", flush=True)
    print(f"err of {RANK}", file=sys.stderr, flush=True)


def fail(directory: Path) -> None:
    """Rank 1 fails, and rank 0 a moment later because of it."""
    if RANK == 1:
        leave(directory, "failed")
        raise StorageError("The disk of rank 1 is full.", remedy="Make room.")
    wait_for(directory, 1)
    time.sleep(0.3)
    raise CommError("Rank 1 failed.")


def die(directory: Path) -> None:
    """Rank 1 starts a process, holds 64 MiB and is killed; rank 0 hangs."""
    if RANK == 1:
        wait_for(directory, 0)
        held = bytearray(os.urandom(1 << 20) * 64)
        leave(directory, f"{subprocess.Popen(CHILD).pid} {len(held)}")
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    hang(directory)


def hang(directory: Path) -> None:
    """Go on for longer than any test, whatever comes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    leave(directory, str(os.getpid()))
    time.sleep(120)


def stop(directory: Path) -> None:
    """Train until a signal comes; rank 0 then writes for a while, as a checkpoint would take."""
    with stop_request() as request:
        request.wait_for_steps(lambda _: None)
        leave(directory, "steps")
        while request.signal is None:
            time.sleep(0.01)
        if RANK == 0:
            time.sleep(1)
            (directory / "checkpoint").write_text("whole")
    raise SystemExit(request.exit_code)


if __name__ == "__main__":
    with failures_explained():
        globals()[sys.argv[1]](Path(sys.argv[2]))
