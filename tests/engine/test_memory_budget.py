"""How much memory training takes: less the more lives on NVMe, never more than the budget, and no more with every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NUM_LAYERS, WIDTH = 24, 768
MIB = 1 << 20


def runs(*asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what each run measured, in bytes above what a process with torch holds anyway."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("memory_runs.py")), json.dumps(asked)],
        capture_output=True, text=True, timeout=280, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    if not results[0]["can_reset"]:
        pytest.skip("this kernel does not let a process reset its peak RSS")
    return results


def bulk(nvme: Path, width: int = WIDTH, num_steps: int = 4, **options: Any) -> dict[str, Any]:
    return {"nvme": str(nvme), "width": width, "num_steps": num_steps, "tile_bytes": "1MiB", **options}


def num_parameters(width: int) -> int:
    return NUM_LAYERS * width * width


def test_memory_falls_from_ram_to_nvme(nvme: Path) -> None:
    """C33, C44: each state that moves to NVMe takes its bytes out of RSS, but for the slots; plan and ledger agree."""
    in_ram, optimizer, everything = runs(
        bulk(nvme, optim="cpu", params="cpu"),
        bulk(nvme, optim="nvme", params="cpu"),
        bulk(nvme, optim="nvme", params="nvme"),
    )
    state, weights, tile_slots = 10 * num_parameters(WIDTH), 2 * num_parameters(WIDTH), 8 * MIB
    assert in_ram["peak"] - optimizer["peak"] >= 0.95 * (state - tile_slots)
    assert optimizer["peak"] - everything["peak"] >= 0.5 * weights
    for result in (in_ram, optimizer, everything):
        assert result["init_peak"] <= result["plan"]
        assert result["peak"] <= result["plan"]
        assert sum(result["ledger"].values()) == pytest.approx(result["peak"], rel=0.15)


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_a_third_of_the_state_is_enough(schedule: str, nvme: Path) -> None:
    """C34: with a budget of a third of the optimizer state, from a model on meta: neither init nor steps exceed it."""
    budget = 10 * num_parameters(WIDTH) // 3
    [result] = runs(bulk(nvme, optim="nvme", params="nvme", cpu_memory=budget, schedule=schedule))
    assert result["init_peak"] <= budget
    assert result["peak"] <= budget
    assert result["plan"] <= budget


def test_auto_placement_keeps_each_budget(nvme: Path) -> None:
    """C47, C148: under shrinking budgets the planner moves states to NVMe, and the process keeps to each of them."""
    whole = 15 * num_parameters(WIDTH)
    budgets = [int(share * whole) for share in (1.0, 0.5, 0.25)]
    results = runs(*(bulk(nvme, optim="auto", params="auto", cpu_memory=budget) for budget in budgets))
    for budget, result in zip(budgets, results, strict=True):
        assert result["init_peak"] <= budget
        assert result["peak"] <= budget
    peaks = [result["peak"] for result in results]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.3 * peaks[0]


def require_flat(result: dict[str, Any]) -> None:
    """Fail unless RSS stays within 5 % of that at step 5 and within the plan (slots are touched when first needed)."""
    samples, base = result["samples"], result["base"]
    assert max(samples[5:]) + base <= 1.05 * (samples[4] + base)
    assert max(samples) <= result["plan"]


MODES: list[dict[str, Any]] = [
    {"io_policy": "mixed"},
    {"io_policy": "burst"},
    {"schedule": "horizontal", "engine": "threads"},
]


def test_rss_is_flat_after_the_fifth_step(nvme: Path) -> None:
    """C17: 35 steps with the writes overlapping, in every mode: RSS stays within 5 % of that at step 5."""
    for result in runs(*(bulk(nvme, width=192, num_steps=35, optim="nvme", params="nvme", **mode) for mode in MODES)):
        require_flat(result)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rss_of_the_whole_bulk_model_is_flat(nvme: Path) -> None:
    """C17: 200 steps of the 25 M parameter model, optimizer on NVMe, in bursts and mixed."""
    for policy in ("mixed", "burst"):
        [result] = runs(
            bulk(nvme, width=1024, num_steps=200, optim="nvme", params="cpu", io_policy=policy, tile_bytes="8MiB")
        )
        require_flat(result)
