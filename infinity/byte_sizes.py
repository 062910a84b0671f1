"""Byte sizes as people write them ("2GiB", "512 MB", 4096) and as the program prints them."""

from __future__ import annotations

import re

from infinity.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# O_DIRECT wants addresses, offsets and lengths to be multiples of the logical block; 4 KiB serves every disk in use.
PAGE_BYTES = 4096

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str | int | float, *, name: str) -> int:
    """Return the number of bytes that `text` means; `name` is the option that an error names.

    Raises ConfigError for anything that is not a positive size.
    """
    match = _SIZE.fullmatch(str(text))
    factor = _FACTORS.get(match[2].lower()) if match else None
    value = int(float(match[1]) * factor) if match and factor else 0
    if value <= 0:
        raise ConfigError(f"{name}: {text!r} is not a size.", remedy="Write for example 2GiB, 512MiB or a number of bytes.")
    return value


def format_bytes(num_bytes: float) -> str:
    """Return a short readable size in binary units, such as "1.50 GiB"."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{int(num_bytes)} B"


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
