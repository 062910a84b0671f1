"""Run as a program: load torch and compute a little on the CPU and on the first CUDA device."""

from __future__ import annotations

import warnings

import torch

from infinity.doctor.answers import CudaDevice, TorchAnswer
from infinity.doctor.trials import give_answer

_SIZE = 16


def compute() -> TorchAnswer:
    """Return what torch is and what worked."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        devices = [_device(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return TorchAnswer(
        version=torch.__version__,
        cuda_build=torch.version.cuda or "",
        num_threads=torch.get_num_threads(),
        bf16_error=_product_error("cpu"),
        devices=devices,
        cuda_error=_product_error("cuda") if devices else "",
        warnings=[str(warning.message) for warning in said],
    )


def _device(index: int) -> CudaDevice:
    found = torch.cuda.get_device_properties(index)
    return CudaDevice(found.name, found.total_memory, f"{found.major}.{found.minor}")


def _product_error(device: str) -> str:
    """Return why a product of bf16 matrices fails or is wrong on a device; "" where it is right."""
    try:
        ones = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16, device=device)
        total = float((ones @ ones).float().sum())
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return "" if total == _SIZE**3 else f"a product of ones sums to {total}"


if __name__ == "__main__":
    give_answer(compute)
