"""Settings of the C library's allocator under which freed CPU tensors go back to the system, so that RSS follows the ledger.

glibc keeps freed blocks below a threshold that grows to 32 MiB by itself, and a heap with holes never shrinks: a loop over
tensors of varied sizes with six of them alive kept 260-340 MB more than those. With a fixed threshold of 2 MiB every larger
tensor is a mapping of its own, unmapped when freed, and 12 MB more were kept. The price is that each is faulted in anew:
6 ms per 10 MB in 4 KiB pages (0.1 ms when reused), so torch is told to ask for huge pages from the same 2 MiB on: 2 ms.
A forward and backward of MLP blocks then takes 6-10 % more CPU time at 1,024 tokens than with glibc's defaults, which held
45 MB more in small pages and 230 MB more in huge ones. (One virtual machine, kernel 6.18, glibc 2.36, torch 2.13.)
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from infinity.byte_sizes import KIB, MIB
from infinity.memory.limits import parse_key_values, rss_bytes

# Parameter numbers of mallopt(3), from glibc's malloc.h, and their values.
_SETTINGS = {
    "M_MMAP_THRESHOLD": (-3, 2 * MIB),
    "M_TRIM_THRESHOLD": (-1, 8 * MIB),  # small tensors reuse the heap's top instead of faulting it in each time
    "M_ARENA_MAX": (-8, 2),  # each arena keeps its own holes
}
_TORCH_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it once, when it allocates its first CPU tensor
_HUGE_PAGE_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PROBE_BYTES = 16 * MIB

Mallopt = Callable[[int, int], int]  # returns 1 when the setting was taken


@dataclass(frozen=True, slots=True)
class HostAllocator:
    """What the allocator does from now on, found by trying; `notes` are sentences on what is not as wanted."""

    returns_freed_memory: bool
    huge_pages: bool
    notes: tuple[str, ...]


def tune_host_allocator() -> HostAllocator:
    """Make freed CPU tensors of 2 MiB and more return to the system, on huge pages where the kernel has them.

    Changes the whole process: the composition root calls it once, before the first CPU tensor is made. A later call works
    too, but without huge pages. `THP_MEM_ALLOC_ENABLE` in the environment wins over it.
    """
    os.environ.setdefault(_TORCH_HUGE_PAGES, "1")
    notes = apply_settings(find_mallopt())
    returned, huge = _probe()
    if not returned:
        notes += ("Freed CPU tensors stay with the process, so its memory may exceed the ledger's peak.",)
    if not huge:
        notes += (f"CPU tensors are not on huge pages, so large ones cost more time to allocate: {why_no_huge_pages()}",)
    return HostAllocator(returned, huge, notes)


def why_no_huge_pages(setting: Path = _HUGE_PAGE_SETTING) -> str:
    """Return the reason and the remedy, a sentence: the kernel has them switched off, or torch was asked too late."""
    try:
        enabled = setting.read_text()
    except OSError:
        return "this kernel has none."
    if "[never]" in enabled:
        return f"{setting} should be madvise or always."
    return f"torch had made a tensor before it was asked; set {_TORCH_HUGE_PAGES}=1 in the environment."


def find_mallopt() -> Mallopt | None:
    """Return the C library's mallopt; None where it has none (musl, other systems)."""
    function = getattr(ctypes.CDLL(None), "mallopt", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int)
    function.restype = ctypes.c_int
    return lambda parameter, value: int(function(parameter, value))


def apply_settings(mallopt: Mallopt | None) -> tuple[str, ...]:
    """Apply every setting and return a sentence for each that was not taken."""
    if mallopt is None:
        return ("The C library has no mallopt; its allocator is left as it is.",)
    refused = [name for name, (parameter, value) in _SETTINGS.items() if mallopt(parameter, value) != 1]
    return tuple(f"The C library refused the setting {name}." for name in refused)


def _probe() -> tuple[bool, bool]:
    """Make and free one tensor; return whether its memory went back to the system and whether it was on huge pages."""
    rss_before, huge_before = rss_bytes(), _huge_page_bytes()
    probe = torch.ones(_PROBE_BYTES, dtype=torch.uint8)
    huge = _huge_page_bytes() - huge_before >= _PROBE_BYTES // 2
    del probe
    return rss_bytes() - rss_before < _PROBE_BYTES // 2, huge


def _huge_page_bytes() -> int:
    return parse_key_values(Path("/proc/self/smaps_rollup").read_text()).get("AnonHugePages", 0) * KIB


def release_free_memory() -> None:
    """Give the free pages between living blocks back to the system (malloc_trim(3)); does nothing without glibc.

    Small tensors that come and go leave holes that the allocator keeps; they would add up over the steps.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
