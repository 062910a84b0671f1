"""The name, dtype and shape of a stored tensor, and how a checkpoint names the states of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from infinity.errors import CheckpointError

# torch's name of a dtype -> the code that safetensors uses, bytes of one element.
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1),
    "bool": ("BOOL", 1), "complex64": ("C64", 8), "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
}  # fmt: skip

# The kinds of tensor beside the planes of optimizer state, which keep the names of infinity.store.layout.STATE_PLANES.
WEIGHT = "weight"
BUFFER = "buffer"


def tensor_name(kind: str, parameter: str) -> str:
    """Return the name under which a state of a parameter is stored, such as "exp_avg/blocks.0.fc.weight"."""
    return f"{kind}/{parameter}"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor before its elements are known; `dtype` is torch's name of it, such as "bfloat16"."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}  # a manifest with unknown keys is refused

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element. Raises CheckpointError for a dtype that safetensors cannot hold."""
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"Tensor {self.name} has dtype {self.dtype}, which safetensors files cannot hold.",
                remedy=f"They hold {', '.join(DTYPES)}.",
            )
        return DTYPES[self.dtype][1]

    @property
    def num_bytes(self) -> int:
        return self.numel * self.element_bytes
