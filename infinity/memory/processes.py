"""How much memory another process holds, read from the kernel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from infinity.byte_sizes import KIB
from infinity.memory.limits import parse_key_values


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What a process holds now and the most it has held (resident set, shared pages included)."""

    resident_bytes: int
    peak_bytes: int


def process_memory(process: Path) -> ProcessMemory | None:
    """Return the memory of the process whose directory below /proc is `process`; None when it holds none any more."""
    try:
        values = parse_key_values((process / "status").read_text())
    except OSError:  # it is gone
        return None
    if "VmRSS" not in values:  # it has ended, and its parent has not taken notice yet
        return None
    return ProcessMemory(values["VmRSS"] * KIB, values["VmHWM"] * KIB)
