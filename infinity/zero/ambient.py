"""What torch keeps per thread and greenlets share: grad mode and autocast, saved and given back.

Every micro-batch runs in a greenlet of the same thread. A `with torch.no_grad():` that is open in one of them when it yields
must not leak into the next. `Ambient` is the part that can be exchanged; `Modes` is the part that cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils import _python_dispatch


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Ambient:
    """Grad mode and autocast at one moment."""

    grad_enabled: bool
    autocasts: tuple[Autocast, ...]
    cache_enabled: bool

    def restore(self) -> None:
        """Make this the state of the running thread."""
        torch._C._set_grad_enabled(self.grad_enabled)
        for autocast in self.autocasts:
            torch.set_autocast_enabled(autocast.device_type, autocast.enabled)
            torch.set_autocast_dtype(autocast.device_type, autocast.dtype)
        torch.set_autocast_cache_enabled(self.cache_enabled)


def ambient(device_types: tuple[str, ...]) -> Ambient:
    """Return the current state."""
    return Ambient(
        grad_enabled=torch.is_grad_enabled(),
        autocasts=autocasts(device_types),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


def autocasts(device_types: tuple[str, ...]) -> tuple[Autocast, ...]:
    """Return the autocast state of each device type."""
    return tuple(Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types)


@dataclass(frozen=True, slots=True)
class Modes:
    """What cannot be exchanged: while it differs from how it was at the start, the micro-batch does not yield."""

    num_function_modes: int
    num_dispatch_modes: int
    saved_tensor_hooks: object  # the innermost pair, if any
    inference: bool
    stream: int


def modes(device: torch.device) -> Modes:
    """Return the current modes; `stream` is 0 without CUDA."""
    return Modes(
        num_function_modes=torch._C._len_torch_function_stack(),
        num_dispatch_modes=len(_python_dispatch._get_current_dispatch_mode_stack()),
        saved_tensor_hooks=torch._C._autograd._top_saved_tensors_default_hooks(False),
        inference=torch.is_inference_mode_enabled(),
        stream=torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0,
    )
