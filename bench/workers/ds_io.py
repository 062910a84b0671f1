"""Serve DeepSpeed's async_io on standard input: a JSON line asks for a transfer of a file, one answers with the time."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder


def transfer(handle: Any, buffer: torch.Tensor, path: str, writes: bool) -> float:
    """Move the whole buffer to or from the file and return the seconds, as DeepSpeed's ds_io counts them."""
    begin = time.perf_counter()
    started = handle.pwrite(buffer, path, False, True) if writes else handle.pread(buffer, path, False, True)
    if started != 0 or handle.wait() != 1:
        raise RuntimeError(f"async_io failed on {path}")
    return time.perf_counter() - begin


def main() -> None:
    """Answer until standard input ends."""
    path, num_bytes = sys.argv[1], int(sys.argv[2])
    module = AsyncIOBuilder().load(verbose=False)
    # Page-locked by its own allocator, as its own benchmark does it; every handle knows such a buffer.
    buffer = module.aio_handle().new_cpu_locked_tensor(num_bytes, torch.empty(0, dtype=torch.uint8))
    buffer.random_(0, 256)
    handles: dict[tuple[Any, ...], Any] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        setting = tuple(asked["setting"])
        if setting not in handles:
            handles.clear()
            handles[setting] = module.aio_handle(*setting)
        handle = handles[setting]
        seconds = transfer(handle, buffer, path, asked["writes"])
        # Its library prints to standard output, too: the answer is the line that begins with a brace.
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
