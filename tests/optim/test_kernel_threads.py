"""The team's threads: bound to the cores that the process may use, and asleep where no core is left for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.optim.kernel_choice import allowed_cores

# Prints facts about the threads of a team; every line of `body` runs in a process of its own. `work` takes some 50 ms.
PROGRAM = """
import os, sys
import numpy as np
from infinity.optim.kernel import open_kernel

def threads():
    return set(os.listdir("/proc/self/task"))

def seconds_on_cpu(thread):
    return int(open(f"/proc/self/task/{thread}/schedstat").read().split()[0]) / 1e9

values = np.ones(40_000_000, dtype=np.float32)
def work():
    assert kernel.gradient_statistics(values.ctypes.data, values.size, "float32").partials.sum() == values.size

main = os.sched_getaffinity(0)
before = threads()
kernel = open_kernel(environment=dict(os.environ))
workers = sorted(threads() - before)
work()
"""

needs_two_cores = pytest.mark.skipif(
    allowed_cores() < 2 or not hasattr(os, "sched_getaffinity"), reason="needs affinity masks and two cores"
)


def facts(body: str, **environment: str) -> str:
    """What the program prints."""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + body], env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_two_cores
def test_workers_are_bound_to_the_cores_and_the_caller_is_left_alone() -> None:
    """C51: under OMP_NUM_THREADS=1 as without, there is a thread for each core that the process may use."""
    body = """
assert len(workers) == len(main) - 1
assert all(os.sched_getaffinity(int(worker)) == main for worker in workers)
assert os.sched_getaffinity(0) == main
print(kernel.num_threads)
"""
    assert facts(body, OMP_NUM_THREADS="1") == str(allowed_cores())


@needs_two_cores
def test_a_rank_keeps_to_its_part_of_the_cores() -> None:
    """C51: the second of two ranks runs on the second half of the cores."""
    body = """
from infinity import _cpu_adam
before = threads()
second = _cpu_adam.CpuAdam("scalar", num_threads=2, share_index=1, num_shares=2)
(worker,) = threads() - before
sums = np.empty(-(-values.size // 4096))
second.sums_of_squares(_cpu_adam.GradFormat.fp32, values.size, grad=values.ctypes.data, sums=sums.ctypes.data)
half = len(main) // 2
print(os.sched_getaffinity(int(worker)) == set(sorted(main)[half : 2 * half]))
"""
    assert facts(body) == "True"


@needs_two_cores
def test_ranks_do_not_share_cores() -> None:
    """C51: as many ranks as cores (two on a 2-core mask): each has one thread, which is the caller's own."""
    body = "print(kernel.num_threads, len(workers))"
    for rank in ("0", "1"):
        assert facts(body, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=str(allowed_cores())) == "1 0"


@needs_two_cores
def test_a_mask_that_became_smaller_is_respected_at_the_next_call() -> None:
    """Workers without a core sleep while the process may use one core only, and work again when it may use more."""
    body = """
os.sched_setaffinity(0, {min(main)})
asleep = [seconds_on_cpu(worker) for worker in workers]
for _ in range(4):
    work()
slept = max(seconds_on_cpu(worker) - start for worker, start in zip(workers, asleep))
os.sched_setaffinity(0, main)
for _ in range(4):
    work()
assert all(os.sched_getaffinity(int(worker)) == main for worker in workers)
print(slept < 0.002)
"""
    assert facts(body) == "True"
