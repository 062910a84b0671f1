"""One rank as a process: started, looked at while it lives, signalled, and gone with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from infinity.launch.ends import End
from infinity.launch.error_file import read_error
from infinity.memory.oom import OomWatch
from infinity.memory.processes import ProcessMemory, process_memory

_PROC = Path("/proc")
# What a rank has said is shown before the launcher's last words, however long its pipe is open.
_RELAY_SECONDS = 2.0


class RankProcess:
    """A rank's process in a session of its own, so that a terminal's Ctrl-C reaches it through the launcher alone.

    Rank 0 writes to the launcher's own standard output and error; each line of another rank goes to standard error, with
    its number before it. Not thread-safe.
    """

    def __init__(
        self, rank: int, process: subprocess.Popen[bytes], relay: threading.Thread | None, error_file: Path
    ) -> None:
        self.rank = rank
        self.end: End | None = None
        self._process = process
        self._relay = relay
        self._error_file = error_file
        self._directory = _PROC / str(process.pid)
        self._memory: ProcessMemory | None = None
        self._oom = OomWatch()
        self._killed = False

    def look(self, now_seconds: float) -> End | None:
        """Note what the process holds, or how it ended; return its end. What it has left running is killed then."""
        if self.end is not None:
            return self.end
        if not self._has_ended():
            self._memory = process_memory(self._directory) or self._memory
            self._oom.look(self._directory)
            return None
        self._kill_group()  # before the process is taken notice of: its number cannot belong to another one yet
        exit_code = self._process.wait()
        if self._relay is not None:
            self._relay.join(_RELAY_SECONDS)
        self.end = End(
            rank=self.rank,
            exit_code=exit_code,
            at_seconds=now_seconds,
            by_launcher=self._killed and exit_code == -signal.SIGKILL,
            error=read_error(self._error_file),
            memory=self._memory,
            oom=self._oom.verdict(),
        )
        return self.end

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on to the rank alone, not to what it started."""
        if self.end is None and not self._has_ended():
            os.kill(self._process.pid, number)  # Popen.send_signal would take notice of an end that `look` is to find

    def kill(self) -> None:
        """Kill the rank and everything that it started."""
        if self.end is None and not self._has_ended():
            self._killed = True
            self._kill_group()

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def start_rank(command: Sequence[str], rank: int, environment: Mapping[str, str], error_file: Path) -> RankProcess:
    """Start one rank. Raises OSError where the command cannot be started."""
    is_first = rank == 0
    process = subprocess.Popen(
        command,
        env=dict(environment),
        stdin=None if is_first else subprocess.DEVNULL,
        stdout=None if is_first else subprocess.PIPE,
        stderr=None if is_first else subprocess.STDOUT,
        start_new_session=True,
    )
    relay = None
    if process.stdout is not None:
        relay = threading.Thread(target=_relay, args=(process.stdout, f"[rank {rank}] ".encode(), _show), daemon=True)
        relay.start()
    return RankProcess(rank, process, relay, error_file)


def _relay(source: IO[bytes], prefix: bytes, show: Callable[[bytes], None]) -> None:
    with source:
        for line in source:
            show(prefix + line if line.endswith(b"\n") else prefix + line + b"\n")


def _show(line: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever read it is gone; the rank goes on
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
