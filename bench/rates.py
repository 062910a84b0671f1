"""Measure what the disk gives through infinity.aio: sequential reads and writes, 1 MiB blocks, depth 32, O_DIRECT."""

from __future__ import annotations

import argparse
import json
import threading
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from infinity.bench.nvme_bed import open_for, open_targets
from infinity.bench.nvme_jobs import Job, NvmeSettings, Traffic
from infinity.bench.nvme_measure import Timing, run_steadily
from infinity.bench.nvme_places import check_places

BLOCK_BYTES = 1 << 20
QUEUE_DEPTH = 32
TIMING = Timing(warm_up_seconds=0.0, window_seconds=2.0, num_windows=1, latency_seconds=0.0)


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
    """Write and read a file of `file_bytes` in `directory` for a time each, with the engine that training uses.

    The time of writing includes that of the fsync after it.
    """
    read, write = (Job(traffic, BLOCK_BYTES, QUEUE_DEPTH) for traffic in (Traffic.READ, Traffic.WRITE))
    settings = NvmeSettings((directory,), size_bytes=file_bytes, engine=engine_kind)
    with ExitStack() as resources:
        places = check_places(settings, (read, write), resources)
        targets, _ = open_targets(places, (read, write), write_seconds=None, tell=lambda _: None, resources=resources)
        rates = []
        for job in (write, read):
            with open_for(targets, places.engines[0], job) as (engines, _):
                run = run_steadily(engines[0], targets[0], job, TIMING, threading.Event())
            rates.append(run.num_bytes / (run.seconds + (run.fsync_seconds or 0.0)))
        engine = places.engines[0]
        return DiskRates(engine, places.direct[engine], file_bytes, rates[1], rates[0])


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
