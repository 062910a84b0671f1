"""The host allocator: freed tensors go back to the system, and what was not possible is said."""

import subprocess
import sys
from pathlib import Path

import pytest

from infinity.memory.host_allocator import apply_settings, why_no_huge_pages

ROOT = Path(__file__).resolve().parents[2]
LOOP = """
import random, sys
import torch
from infinity.memory.host_allocator import tune_host_allocator
from infinity.memory.limits import rss_bytes
torch.set_num_threads(1)
if sys.argv[1] == "tuned":
    allocator = tune_host_allocator()
    print(allocator.returns_freed_memory, file=sys.stderr)
random.seed(0)
base, alive, small, worst = rss_bytes(), [], [], 0
for _ in range(80):
    num_bytes = int(random.choice([0.1, 0.5, 3, 7, 10, 20, 30]) * random.uniform(0.7, 1.3) * 2**20)
    dtype = random.choice([torch.float32, torch.bfloat16])
    alive.append(torch.ones(num_bytes // dtype.itemsize, dtype=dtype))
    small.append(torch.ones(random.randint(10, 3000)))
    if len(alive) > 6:
        del alive[random.randrange(6)]
    worst = max(worst, rss_bytes() - base - sum(tensor.nbytes for tensor in alive))
print(worst)
"""


def worst_excess_bytes(mode: str) -> int:
    """Return how far the resident set ever exceeded the living tensors, in a process of its own."""
    result = subprocess.run([sys.executable, "-c", LOOP, mode], capture_output=True, text=True, cwd=ROOT, check=True)
    assert mode == "default" or "True" in result.stderr
    return int(result.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_resident_memory_follows_the_living_tensors() -> None:
    """C17: over large tensors of varied sizes RSS stays within 24 MiB of what lives; with glibc's defaults it does not."""
    assert worst_excess_bytes("tuned") < 24 * 2**20 < worst_excess_bytes("default")


def test_every_refused_setting_is_named() -> None:
    """A C library that takes only some settings, or has no mallopt at all, is reported in sentences."""
    asked: list[tuple[int, int]] = []

    def take_one(parameter: int, value: int) -> int:
        asked.append((parameter, value))
        return int(parameter == -3)

    assert apply_settings(take_one) == (
        "The C library refused the setting M_TRIM_THRESHOLD.",
        "The C library refused the setting M_ARENA_MAX.",
    )
    assert asked[0] == (-3, 2 << 20)
    assert apply_settings(lambda parameter, value: 1) == ()
    assert "no mallopt" in apply_settings(None)[0]


def test_missing_huge_pages_have_a_reason_that_holds(tmp_path: Path) -> None:
    """The kernel is named where it has them switched off or not at all; otherwise torch was asked too late."""
    setting = tmp_path / "enabled"
    assert "this kernel has none" in why_no_huge_pages(setting)
    for text, said in (("always madvise [never]\n", f"{setting} should be"), ("always [madvise] never\n", "environment")):
        setting.write_text(text)
        assert said in why_no_huge_pages(setting)
