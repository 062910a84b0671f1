"""Checks of what computes: torch, and CUDA where there is a device."""

from __future__ import annotations

import re
from dataclasses import dataclass

from infinity.byte_sizes import format_bytes
from infinity.doctor.answers import TorchAnswer, read_torch_answer
from infinity.doctor.machine import Machine
from infinity.doctor.remedies import Setting, allow
from infinity.doctor.surroundings import Container
from infinity.doctor.verdict import Verdict, fails, missing, note, ok

_CHOOSER = "https://pytorch.org/get-started/locally"
_DRIVER = "proc/driver/nvidia/version"


@dataclass(frozen=True, slots=True)
class Compute:
    """A torch that loads, on its machine."""

    machine: Machine
    torch: TorchAnswer


def try_torch(machine: Machine) -> tuple[Verdict, Compute | None]:
    """Load torch and compute a little with it; return whether that works, and if it loads what it is."""
    needed = "a torch that loads and multiplies matrices"
    if not machine.has_module("torch"):
        return missing("torch is not installed", needed=needed, remedy=f"pip install torch (which build: {_CHOOSER})"), None
    trial = machine.run_trial("infinity.doctor.try_torch")
    if trial.answer is None:
        verdict = fails(
            f"torch does not load: {trial.failure}", needed=needed,
            remedy=f"Install a build that fits this machine: {_CHOOSER}",
        )  # fmt: skip
        return verdict, None
    torch = read_torch_answer(trial.answer)
    found = f"{torch.version}, {f'built with CUDA {torch.cuda_build}' if torch.cuda_build else 'built without CUDA'}"
    verdict = ok(f"{found}, threads: {torch.num_threads}", needed=needed)
    if torch.bf16_error:
        verdict = note(
            f"{found}; bf16 does not work on the CPU: {torch.bf16_error}", needed=needed,
            remedy="Train in fp32: `--precision fp32`.",
        )  # fmt: skip
    return verdict, Compute(machine, torch)


def check_cuda(compute: Compute) -> Verdict:
    """Which CUDA device computes, tried by a small product; without one the CPU is the compute tier."""
    machine, torch = compute.machine, compute.torch
    needed = "a CUDA device that computes; without one the CPU does"
    if torch.devices:
        found = "; ".join(
            f"{device.name}, {format_bytes(device.total_bytes)}, compute capability {device.capability}"
            for device in torch.devices
        )
        if torch.cuda_error:
            return fails(
                f"{found}: it does not compute: {torch.cuda_error}", needed=needed,
                remedy=f"Install a torch that is built for it ({_CHOOSER}), or hide it: CUDA_VISIBLE_DEVICES=''",
            )  # fmt: skip
        return ok(f"{found}, driver {_driver(machine)}", needed=needed)
    if not machine.has_nvidia_device:
        return _without_device(compute, needed)
    driver = f"an NVIDIA device is here (driver {_driver(machine)})"
    if not torch.cuda_build:
        return note(
            f"{driver}, and this torch is built without CUDA: the CPU computes", needed=needed,
            remedy=f"Install a torch that is built with CUDA: {_CHOOSER}",
        )  # fmt: skip
    why = " ".join(torch.warnings) or "torch does not say why"
    return note(
        f"{driver}, and torch, built with CUDA {torch.cuda_build}, cannot use it: {why}", needed=needed,
        remedy=f"Install a newer NVIDIA driver{_where(machine)}, or a torch that is built with an older CUDA: {_CHOOSER}",
    )  # fmt: skip


def _without_device(compute: Compute, needed: str) -> Verdict:
    found = "no CUDA device: the CPU computes"
    surroundings = compute.machine.surroundings
    if compute.torch.cuda_build and surroundings.container is not Container.NONE:
        return note(found, needed=needed, remedy=allow(Setting.GPU, surroundings))
    return ok(found, needed=needed)


def _driver(machine: Machine) -> str:
    """Return the version of the kernel's driver, from its own file."""
    match = re.search(r"Kernel Module\D*([0-9]+(?:\.[0-9]+)+)", machine.text(_DRIVER) or "")
    return match[1] if match else "of unknown version"


def _where(machine: Machine) -> str:
    return "" if machine.surroundings.container is Container.NONE else " on the host"
