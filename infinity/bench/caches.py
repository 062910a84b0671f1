"""How large this machine's caches are; read from the system, no torch."""

from __future__ import annotations

from pathlib import Path

from infinity.byte_sizes import KIB, MIB

_CPUS = Path("/sys/devices/system/cpu")
_UNITS = {"K": KIB, "M": MIB}


def last_level_cache_bytes(cpus: Path = _CPUS) -> int | None:
    """Return the bytes of the last level of cache over all cores, each cache counted once; None where that is not told."""
    found: dict[tuple[int, str], int] = {}
    for index in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            kind, level, size, sharers = (
                (index / name).read_text().strip() for name in ("type", "level", "size", "shared_cpu_list")
            )
        except OSError:  # a core that is off
            continue
        if kind != "Instruction" and size[:-1].isdigit() and size[-1] in _UNITS:
            found[int(level), sharers] = int(size[:-1]) * _UNITS[size[-1]]
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or None
