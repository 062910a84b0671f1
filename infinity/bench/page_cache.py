"""How much of a file is in the page cache, asked of the kernel with mincore(2)."""

from __future__ import annotations

import ctypes
import mmap
import os

from infinity.byte_sizes import PAGE_BYTES

_libc = ctypes.CDLL(None, use_errno=True)


def resident_share(fd: int) -> float:
    """Return the share of the pages of an open file that are in the page cache; 0 where the system does not say."""
    num_bytes = os.fstat(fd).st_size
    if num_bytes == 0:
        return 0.0
    with mmap.mmap(fd, num_bytes) as mapping:
        # A view in between, so that no address outlives the mapping.
        first = ctypes.c_char.from_buffer(mapping)
        pages = ctypes.create_string_buffer(-(-num_bytes // PAGE_BYTES))
        failed = _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(num_bytes), pages)
        del first
    return 0.0 if failed else sum(byte & 1 for byte in pages.raw) / len(pages)
