"""Whether a process of this machine works, although it says nothing: Python's lock is held by what it computes."""

from __future__ import annotations

from pathlib import Path

_RUNNING = "R"


def is_running(process_id: int) -> bool:
    """Return whether the process runs or waits for a core just now; False for one that sleeps, is stopped or is gone.

    Source: proc_pid_stat(5), field 3. False where there is no /proc.
    """
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == _RUNNING
