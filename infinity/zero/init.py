"""Models larger than RAM, built as they are written: each parameter moves to a file as soon as its module has it.

A parameter that lives in a mapped file is an ordinary tensor: initialisers, tied weights, `load_state_dict` and reads work
inside the block and after it, in any order, and keep every bit. Its pages are the page cache's, which the system writes out
and takes back when memory runs short. `infinity.initialize` then takes the values over one parameter at a time. The file has
no name, so that nothing is left behind when the process ends; its space is free when the parameter lets go of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from infinity.config import Config
from infinity.errors import ConfigError, StorageError


class Init:
    """`with Init(config_dict_or_path=config):` builds modules whose parameters live in files below its NVMe directory.

    Without such a directory, with remote_device "cpu" or with `enabled=False` they stay in memory. `dtype` converts
    floating-point parameters as they are made; without it they keep theirs, so that masters are exact. `module` is one that
    exists already: its parameters move when Init is made. Parameters on the meta device have no values and stay there.
    `mem_efficient_linear` and `pin_memory` change nothing: weights are never saved for backward, and what is copied to a GPU
    is pinned by the engine.

    Raises ConfigError for a configuration that is given twice or asks for an NVMe directory that it does not name, and
    StorageError where a file cannot be made.
    """

    _num_active = 0

    def __init__(
        self,
        module: nn.Module | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Config | Mapping[str, object] | str | Path | None = None,
        config: Config | Mapping[str, object] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._enabled = enabled
        self._dtype = dtype
        self._directory = _directory(config_dict_or_path, config, remote_device) if enabled else None
        self._hook: RemovableHandle | None = None
        if module is not None and enabled:
            for parameter in module.parameters():
                self._move(parameter)

    def __enter__(self) -> Init:
        if self._enabled and Init._num_active == 0:
            self._hook = register_module_parameter_registration_hook(self._take)
        Init._num_active += self._enabled
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        Init._num_active -= self._enabled
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _take(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Called by torch when a module gets a parameter, before anything fills it."""
        if isinstance(parameter, nn.Parameter):
            self._move(parameter)

    def _move(self, parameter: nn.Parameter) -> None:
        values = parameter.data
        if values.is_meta or values.device.type != "cpu":
            return
        dtype = self._dtype if self._dtype is not None and values.is_floating_point() else values.dtype
        if self._directory is None or _in_file(values):
            parameter.data = values.to(dtype)
            return
        moved = _mapped(self._directory, values.numel(), dtype).view(values.shape)
        parameter.data = moved.copy_(values)


def _in_file(values: torch.Tensor) -> bool:
    return values.untyped_storage().filename is not None


def _mapped(directory: Path, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a file of its own that has no name any more."""
    if not num_elements:
        return torch.empty(0, dtype=dtype)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix="infinity-init-") as file:
            return torch.from_file(file.name, shared=True, size=num_elements, dtype=dtype)
    except (OSError, RuntimeError) as error:
        raise StorageError(
            f"{num_elements * dtype.itemsize} bytes for a parameter could not be mapped in {directory}: {error}",
            remedy="Give a directory with room, or build the model on the meta device.",
        ) from error


def _directory(
    one: Config | Mapping[str, object] | str | Path | None,
    other: Config | Mapping[str, object] | str | Path | None,
    remote_device: str | None,
) -> Path | None:
    if one is not None and other is not None:
        raise ConfigError("zero.Init got config_dict_or_path and config.", remedy="Give one of them.")
    found = Config.from_any(one if one is not None else other).nvme_directories
    if remote_device not in (None, "none", "cpu", "nvme"):
        raise ConfigError(f"zero.Init: remote_device {remote_device!r} is none.", remedy='Write "nvme", "cpu" or "none".')
    if remote_device == "nvme" and not found:
        raise ConfigError(
            "zero.Init: remote_device is nvme, but the configuration names no directory.", remedy="Set infinity.nvme."
        )
    return found[0] if found and remote_device in (None, "nvme") else None
