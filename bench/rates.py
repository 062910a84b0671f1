"""Measure what the disk gives through infinity.aio: sequential reads and writes, 1 MiB blocks, depth 32, O_DIRECT."""

from __future__ import annotations

import argparse
import json
import mmap
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from infinity.aio.engine import Engine
from infinity.aio.files import DirectFile, open_direct
from infinity.aio.request import Op, Request
from infinity.aio.select import open_engine
from infinity.handles import Handle

BLOCK_BYTES = 1 << 20
QUEUE_DEPTH = 32
BUFFER_BYTES = 256 << 20


@dataclass(frozen=True)
class DiskRates:
    """Bytes per second in one direction at a time, over `file_bytes` bytes."""

    engine: str
    direct: bool
    file_bytes: int
    read_bytes_per_second: float
    write_bytes_per_second: float

    def seconds(self, read_bytes: float, write_bytes: float) -> float:
        """Return the time that these volumes take one after the other."""
        return read_bytes / self.read_bytes_per_second + write_bytes / self.write_bytes_per_second

    def mean_with(self, other: DiskRates) -> DiskRates:
        """Return the rates between this measurement and a later one: a shared disk drifts during a long run."""
        return replace(
            self,
            read_bytes_per_second=(self.read_bytes_per_second + other.read_bytes_per_second) / 2,
            write_bytes_per_second=(self.write_bytes_per_second + other.write_bytes_per_second) / 2,
        )


def measure_rates(directory: Path, file_bytes: int = 4 << 30, engine_kind: str = "auto") -> DiskRates:
    """Write and then read one file of `file_bytes` in `directory`, both through the engine that training uses."""
    path = directory / f"rates-{time.monotonic_ns()}.bin"
    engine = open_engine(engine_kind, queue_depth=QUEUE_DEPTH, block_bytes=BLOCK_BYTES)
    memory = mmap.mmap(-1, BUFFER_BYTES)
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    buffer.random_(0, 256)
    try:
        file = open_direct(path, create=True)
        try:
            run_pass(engine, file, Op.WRITE, buffer, file_bytes)  # the first write of a file also allocates it
            write_rate = file_bytes / run_pass(engine, file, Op.WRITE, buffer, file_bytes)
            read_rate = file_bytes / run_pass(engine, file, Op.READ, buffer, file_bytes)
            return DiskRates(engine.name, file.direct, file_bytes, read_rate, write_rate)
        finally:
            file.close()
    finally:
        engine.close()
        path.unlink(missing_ok=True)


def run_pass(engine: Engine, file: DirectFile, op: Op, buffer: torch.Tensor, file_bytes: int) -> float:
    """Move the whole file once, two buffers' worth of requests in flight, and return the seconds it took."""
    half_bytes = buffer.numel() // 2
    begin = time.perf_counter()
    pending: list[list[Handle[None]]] = []
    for index, offset in enumerate(range(0, file_bytes, half_bytes)):
        address = buffer.data_ptr() + (index % 2) * half_bytes
        length = min(half_bytes, file_bytes - offset)
        if len(pending) == 2:
            for handle in pending.pop(0):
                handle.wait()
        pending.append(engine.submit([Request(op, file, offset, address, length, buffer)]))
    for handles in pending:
        for handle in handles:
            handle.wait()
    if op is Op.WRITE:
        file.sync()
    return time.perf_counter() - begin


def main() -> None:
    """Print the rates of one directory as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--engine", default="auto")
    arguments = parser.parse_args()
    print(
        json.dumps(asdict(measure_rates(arguments.directory, int(arguments.gigabytes * 2**30), arguments.engine)), indent=2)
    )


if __name__ == "__main__":
    main()
