"""Page-locking of host memory for CUDA: registered where it works, pageable with one note where it does not."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import cache
from typing import Protocol

import torch

from infinity.byte_sizes import format_bytes

_log = logging.getLogger(__name__)
_CUDA_SUCCESS = 0


class CudaRuntime(Protocol):
    """The calls of the CUDA runtime that pinning needs; the first two return an error number, 0 for success."""

    def host_register(self, address: int, num_bytes: int) -> int: ...

    def host_unregister(self, address: int) -> int: ...

    def forget_error(self) -> None:
        """Let nobody else find the error of a call that failed."""
        ...


class TorchCudaRuntime:
    """The CUDA runtime that torch has loaded."""

    def host_register(self, address: int, num_bytes: int) -> int:
        return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]

    def host_unregister(self, address: int) -> int:
        return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]

    def forget_error(self) -> None:
        # The runtime remembers a failed call, and torch raises it after the next kernel that it launches: so launch one.
        with suppress(RuntimeError):
            torch.empty(1, device="cuda").fill_(0)


class HostPinner:
    """Pins host memory. Without a runtime (no CUDA device) it does nothing.

    A refused registration is no error: the memory stays pageable, copies are slower, and one note is logged for all.
    """

    def __init__(self, runtime: CudaRuntime | None) -> None:
        self._runtime = runtime
        self.note = ""  # what was refused first; empty while nothing was

    def pin(self, address: int, num_bytes: int) -> bool:
        """Page-lock the range and return whether it is page-locked now."""
        if self._runtime is None:
            return False
        error = self._runtime.host_register(address, num_bytes)
        if error != _CUDA_SUCCESS:
            self._runtime.forget_error()
            self._note_once(error, num_bytes)
        return error == _CUDA_SUCCESS

    def _note_once(self, error: int, num_bytes: int) -> None:
        if not self.note:
            self.note = (
                f"Pinning {format_bytes(num_bytes)} of host memory failed (CUDA error {error}); it stays pageable, so "
                "copies to the GPU are slower. Raise the memory limit of the container or lower the CPU memory budget."
            )
            _log.warning(self.note)

    def unpin(self, address: int) -> None:
        """Undo `pin` for a range that it page-locked."""
        if self._runtime is not None:
            self._runtime.host_unregister(address)


@cache
def host_pinner() -> HostPinner:
    """Return the process's pinner; the first call looks for a CUDA device."""
    return HostPinner(TorchCudaRuntime() if torch.cuda.is_available() else None)
