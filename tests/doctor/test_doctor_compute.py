"""The lines on torch and CUDA, in every state, for drivers and builds that are not this machine's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import machine_samples as samples
import pytest

from infinity.doctor.compute import check_cuda, try_torch
from infinity.doctor.trials import Trial
from infinity.doctor.verdict import State, Verdict

DRIVER = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 2024\n"
    "GCC version:  gcc version 11.4.0\n",
    "dev/nvidia0": "",
}
TOO_OLD = "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040)."


def verdicts(
    root: Path, *, files: Mapping[str, str] = {}, environment: Mapping[str, str] = {}, **torch: Any
) -> list[Verdict]:
    """Return the verdicts on torch and on CUDA where the trial of torch answered with these changes."""
    trials = {"infinity.doctor.try_torch": Trial(answer={**samples.TORCH, **torch})}
    machine = samples.fake_machine(root, files=files, environment=environment, trials=trials)
    verdict, compute = try_torch(machine)
    assert compute is not None
    return [verdict, check_cuda(compute)]


def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    """C22: no CUDA device is no fault: the CPU computes."""
    torch, cuda = verdicts(tmp_path, cuda_build="", version="2.13.0+cpu")
    assert torch.found == "2.13.0+cpu, built without CUDA, threads: 2"
    assert (torch.state, cuda.state) == (State.OK, State.OK)
    assert cuda.found == "no CUDA device: the CPU computes"


def test_a_container_that_may_hide_a_gpu(tmp_path: Path) -> None:
    """A CUDA build in a container without a device: a note with the engine's option, in case that the host has one."""
    _, cuda = verdicts(tmp_path, environment={"container": "docker"})
    assert (cuda.state, cuda.exit_code) == (State.NOTE, 0)
    assert "docker run --gpus all" in cuda.remedy


def test_a_gpu_that_computes(tmp_path: Path) -> None:
    """The device, its memory, its capability and the driver's version are in the line."""
    _, cuda = verdicts(tmp_path, files=DRIVER, devices=[samples.H200])
    assert cuda.state is State.OK
    assert cuda.found == "NVIDIA H200, 139.00 GiB, compute capability 9.0, driver 470.256.02"


def test_a_gpu_that_does_not_compute(tmp_path: Path) -> None:
    """Training would choose the device and fail, so this is an obstacle."""
    _, cuda = verdicts(tmp_path, devices=[samples.H200], cuda_error="CUDA error: no kernel image is available")
    assert (cuda.state, cuda.exit_code) == (State.FAILS, 4)
    assert "no kernel image" in cuda.found
    assert "CUDA_VISIBLE_DEVICES=''" in cuda.remedy


def test_a_driver_that_is_too_old(tmp_path: Path) -> None:
    """A device that torch cannot use: a note with driver, build and torch's own reason; the CPU computes."""
    _, cuda = verdicts(tmp_path, files=DRIVER, warnings=[TOO_OLD])
    assert (cuda.state, cuda.exit_code) == (State.NOTE, 0)
    assert "470.256.02" in cuda.found
    assert "built with CUDA 13.0" in cuda.found
    assert TOO_OLD in cuda.found
    assert "newer NVIDIA driver," in cuda.remedy


def test_a_torch_without_cuda_beside_a_gpu(tmp_path: Path) -> None:
    """A device and a CPU build of torch: a note that says which build to install."""
    _, cuda = verdicts(tmp_path, files=DRIVER, cuda_build="")
    assert cuda.state is State.NOTE
    assert "built without CUDA" in cuda.found
    assert "built with CUDA" in cuda.remedy


def test_a_torch_without_bf16(tmp_path: Path) -> None:
    """Where the CPU has no bf16 product, fp32 trains: a note."""
    torch, _ = verdicts(tmp_path, bf16_error="not implemented for 'BFloat16'")
    assert (torch.state, torch.remedy) == (State.NOTE, "Train in fp32: `--precision fp32`.")


@pytest.mark.parametrize(
    ("modules", "trial", "state", "words"),
    [
        (frozenset(), Trial(), State.MISSING, "not installed"),
        (
            samples.MODULES,
            Trial(failure="OSError: libcudart.so.13: cannot open"),
            State.FAILS,
            "libcudart",
        ),
        (samples.MODULES, Trial(failure="ended by SIGILL"), State.FAILS, "ended by SIGILL"),
    ],
)
def test_a_torch_that_does_not_load(tmp_path: Path, modules: frozenset[str], trial: Trial, state: State, words: str) -> None:
    """C21: absent, broken or built for another CPU: one line, and no line on CUDA."""
    machine = samples.fake_machine(tmp_path, modules=modules, trials={"infinity.doctor.try_torch": trial})
    verdict, compute = try_torch(machine)
    assert compute is None
    assert (verdict.state, verdict.exit_code) == (state, 4)
    assert words in verdict.found
