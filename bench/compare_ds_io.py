"""DeepSpeed's async_io (what its ds_io measures) and infinity.aio in turn: one file moved whole, each side at its best.

Both sides get the same file, which was written once, O_DIRECT and one buffer as long as it, from their own allocators: ours
is on huge pages, DeepSpeed's is not. So DeepSpeed is also measured with glibc's tunable for them, which is no setting of its
own. What is written is synced after each run, apart. DeepSpeed lives in a virtual environment that this script makes; where
it cannot, a sentence says why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from compare_deepspeed import DEEPSPEED, WORKERS, Unavailable, prepare_deepspeed
from pairs import Measurement, Pairs, measure_until_decided, pairs_table
from provenance import ROOT, describe_directory, write_results

from infinity.aio.engine import EngineFacts, MemoryRange
from infinity.aio.request import Op, Request
from infinity.aio.select import open_engine
from infinity.bench.nvme_bed import fill_randomly, open_targets
from infinity.bench.nvme_jobs import WRITING_JOB, NvmeSettings
from infinity.bench.nvme_places import check_places
from infinity.bench.nvme_stream import Target
from infinity.memory.arena import Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.states import Tier

MIB = 1 << 20
LEAST, NOTHING = 1.0, 0.0  # what is promised
AS_IT_IS, ON_HUGE_PAGES = "as it is", "on huge pages"
VARIABLES = {AS_IT_IS: {}, ON_HUGE_PAGES: {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}}
NUM_SWEEPS = 2
# block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism
THEIR_SETTINGS = tuple(product((MIB, 8 * MIB), (32, 128), (False,), (False, True), (1, 2)))
OUR_SETTINGS = ((MIB, 32), (MIB, 64), (4 * MIB, 16), (8 * MIB, 32), (8 * MIB, 128))

Setting = tuple[Any, ...]


class TheirSide:
    """DeepSpeed in a process of its own, which lives as long as the comparison."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def seconds(self, setting: Setting, op: Op) -> float:
        """Move the file once and return the seconds that it took. Raises RuntimeError when the process ends."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        self._process.stdin.write(json.dumps({"setting": setting, "writes": op is Op.WRITE}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return float(json.loads(line)["seconds"])
        raise RuntimeError(f"DeepSpeed's worker ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


class OurSide:
    """An engine for one setting at a time, with file and buffer registered, on one buffer as long as the file."""

    def __init__(self, target: Target, buffer: Buffer) -> None:
        self._target = target
        self._buffer = buffer
        self.facts: list[EngineFacts] = []  # of every engine that was opened
        self._setting: Setting = ()
        self._open = ExitStack()

    def seconds(self, setting: Setting, op: Op) -> float:
        """Move the file once, in one request, and return the seconds that it took."""
        if setting != self._setting:
            self._open.close()
            self._engine = open_engine("auto", block_bytes=setting[0], queue_depth=setting[1])
            self._open.callback(self._engine.close)
            memory = MemoryRange(self._buffer.address, self._buffer.num_bytes)
            self._engine.register(files=[self._target.file], memory=[memory])
            self.facts.append(self._engine.facts)
            self._setting = setting
        request = Request(op, self._target.file, 0, self._buffer.address, self._target.file_bytes, self._buffer)
        begin = time.perf_counter()
        self._engine.submit([request])[0].wait()
        return time.perf_counter() - begin

    def close(self) -> None:
        """Close the engine."""
        self._open.close()


def best_setting(side: TheirSide | OurSide, settings: tuple[Setting, ...], op: Op, target: Target) -> Setting:
    """Return the setting with the shortest of a few runs."""

    def shortest(setting: Setting) -> float:
        found = []
        for _ in range(NUM_SWEEPS):
            found.append(side.seconds(setting, op))
            target.file.sync()
        return min(found)

    return min(settings, key=shortest)


def start_their_side(venv: Path, target: Target, more: dict[str, str]) -> TheirSide:
    """Start DeepSpeed's worker, with more variables. Raises Unavailable where DeepSpeed cannot be installed."""
    python, environment = prepare_deepspeed(venv)
    command = [str(python), str(WORKERS / "ds_io.py"), str(target.file.path), str(target.file_bytes)]
    pipe = subprocess.PIPE
    return TheirSide(subprocess.Popen(command, env={**environment, **more}, stdin=pipe, stdout=pipe, text=True))


def pair(op: Op, name: str, ours: OurSide, theirs: TheirSide, target: Target) -> tuple[Pairs, dict[str, Setting]]:
    """Return the two sides of one direction at their best settings, and these."""
    best = {"ours": best_setting(ours, OUR_SETTINGS, op, target), "theirs": best_setting(theirs, THEIR_SETTINGS, op, target)}

    def measure(side: OurSide | TheirSide, setting: Setting) -> Measurement:
        seconds = side.seconds(setting, op)
        begin = time.perf_counter()
        target.file.sync()
        fsync_seconds = time.perf_counter() - begin if op is Op.WRITE else None
        return Measurement(target.file_bytes / seconds, target.file_bytes, fsync_seconds=fsync_seconds)

    least = LEAST if name == AS_IT_IS else NOTHING
    what = f"{op.value}, {name}"
    return Pairs(what, least, lambda: measure(ours, best["ours"]), lambda: measure(theirs, best["theirs"])), best


def main() -> int:
    """Measure, write the results and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nvme", type=Path, default=ROOT / "scratch", help="directory on the disk to measure")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-deepspeed", help="DeepSpeed's virtual environment")
    parser.add_argument("--gigabytes", type=int, default=1, help="GiB of the file and of each side's buffer")
    parser.add_argument("--pairs", type=int, default=15, help="of each direction, at least")
    parser.add_argument("--minutes", type=float, default=5.0, help="when no further pairs begin")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    arguments.nvme.mkdir(parents=True, exist_ok=True)
    num_bytes = arguments.gigabytes << 30
    with ExitStack() as resources:
        places = check_places(NvmeSettings((arguments.nvme,), size_bytes=num_bytes), (WRITING_JOB,), resources)
        (target,), _ = open_targets(places, (), write_seconds=None, tell=print, resources=resources)
        arena = open_arena(num_bytes, ledger=Ledger({}), tier=Tier.CPU, owner="compare_ds_io", pin=False)
        resources.callback(arena.close)
        fill_randomly(arena.buffer)
        ours = OurSide(target, arena.buffer)
        resources.callback(ours.close)
        found = []
        for name, variables in VARIABLES.items():
            try:
                theirs = start_their_side(arguments.venv.resolve(), target, variables)
            except Unavailable as reason:
                print(reason)
                return 0
            resources.callback(theirs.close)
            found += [pair(op, name, ours, theirs, target) for op in Op]
        jobs = [job for job, _ in found]
        measure_until_decided(jobs, arguments.pairs, lambda: end - time.monotonic())
    settings = {job.what: best for job, best in found}
    results = {
        "disk": describe_directory(arguments.nvme), "settings": settings,
        "registered_files": all(one.registered_files for one in ours.facts),
        "registered_buffers": all(one.registered_buffers for one in ours.facts),
        "jobs": [job.as_json() for job in jobs],
    }  # fmt: skip
    table = pairs_table(jobs, "infinity", "DeepSpeed")
    said = "\n".join(
        f"{what}: infinity block {best['ours'][0]}, depth {best['ours'][1]}; DeepSpeed block_size, queue_depth, "
        f"single_submit, overlap_events, intra_op_parallelism {', '.join(map(str, best['theirs']))}."
        for what, best in settings.items()
    )
    title = f"infinity.aio and the async_io of {DEEPSPEED}, one file moved whole"
    write_results("compare_ds_io", results, title, f"{table}\n\n{said}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
