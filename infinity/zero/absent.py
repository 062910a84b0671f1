"""What a parameter is while its weights are away: shape, dtype and device can be read, every operation is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from infinity.errors import AbsentParameterError

# What may be asked of a parameter without touching its values. Property reads arrive as `Tensor.<name>.__get__`.
_READABLE_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "names", "requires_grad", "is_leaf", "grad", "grad_fn", "itemsize",
    "nbytes", "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "retains_grad",
)  # fmt: skip
_READABLE_METHODS = (
    "size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous", "is_floating_point", "is_complex",
    "get_device", "__len__", "__hash__",
)  # fmt: skip
_ALLOWED: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _READABLE_PROPERTIES if hasattr(torch.Tensor, name)]
    + [getattr(torch.Tensor, name) for name in _READABLE_METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)


class AbsentParameter(nn.Parameter):
    """Stands for a parameter whose weights live elsewhere. Any operation on it raises AbsentParameterError.

    While it is gathered (`GatheredParameters`), operations are made on the values that were gathered.
    """

    parameter_name: str
    unit_name: str
    gathered: torch.Tensor | None = None

    @staticmethod
    def standing_for(
        name: str, unit: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, trainable: bool
    ) -> AbsentParameter:
        """Return a parameter without storage that answers for `name`, which belongs to `unit`."""
        absent: AbsentParameter = torch.Tensor._make_wrapper_subclass(
            AbsentParameter, tuple(shape), dtype=dtype, device=device, requires_grad=trainable
        )
        absent.parameter_name, absent.unit_name = name, unit
        return absent

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        values, named_values = tree_map_only(AbsentParameter, _gathered_or_itself, (tuple(args), dict(kwargs or {})))
        if _first((*values, *named_values.values())) is not None:
            raise _error(func, values, named_values)
        return func(*values, **named_values)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise _error(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        name, shape = self.parameter_name, tuple(self.shape)
        return f"AbsentParameter({name}, shape={shape}, dtype={self.dtype}, unit={self.unit_name})"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise _error("pickle", (self,), {})

    def __deepcopy__(self, memo: object) -> Any:
        if self.gathered is not None:
            return copy.deepcopy(self.gathered)
        raise _error("deepcopy", (self,), {})


def _gathered_or_itself(absent: AbsentParameter) -> torch.Tensor:
    return absent if absent.gathered is None else absent.gathered


def _error(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> AbsentParameterError:
    absent = _first((*args, *kwargs.values()))
    name = absent.parameter_name if absent is not None else "a parameter"
    unit = absent.unit_name if absent is not None else "its unit"
    operation = getattr(func, "__name__", str(func))
    return AbsentParameterError(
        f"Parameter {name} was used by {operation!r} outside unit {unit!r}, while its weights are away.",
        remedy="Use it inside the unit's forward; or read it inside infinity.zero.GatheredParameters(...); or list in "
        "infinity.units the modules that are to be units, without the one that holds it: parameters of no unit may be used "
        "anywhere.",
    )


def _first(values: Iterable[Any]) -> AbsentParameter | None:
    for value in values:
        if isinstance(value, AbsentParameter):
            return value
        if isinstance(value, (tuple, list)):
            found = _first(value)
            if found is not None:
                return found
    return None
