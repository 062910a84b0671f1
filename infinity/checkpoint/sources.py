"""Where the elements of a checkpoint come from: units that give their tensors tile by tile, never whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from infinity.checkpoint.specs import TensorSpec
from infinity.errors import CheckpointError

# Elements in host memory: a contiguous torch tensor of the spec's dtype, or anything else as raw little-endian bytes.
HostData: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[Any] | torch.Tensor"


class UnitSource(Protocol):
    """The tensors of one unit (or all module buffers), known by spec first and read piece by piece."""

    @property
    def name(self) -> str: ...

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor of the unit, named by `specs.tensor_name`."""
        ...

    def pieces(self) -> Iterable[tuple[str, int, HostData]]:
        """Yield (tensor name, first element in the flattened tensor, elements) until every element was given once.

        Pieces may come in any order. The data need only stay valid until the next piece is asked for.
        """
        ...


def host_bytes(spec: TensorSpec, data: HostData) -> memoryview:
    """Return the bytes of `data` without copying them; a view of writable data is writable.

    Raises CheckpointError for a tensor of another dtype than `spec`, on a device, or with gaps between its elements.
    """
    if isinstance(data, torch.Tensor):
        found = str(data.dtype).removeprefix("torch.")
        if found != spec.dtype or data.device.type != "cpu" or not data.is_contiguous():
            layout = "contiguous" if data.is_contiguous() else "strided"
            raise CheckpointError(
                f"Tensor {spec.name}: got a {layout} {found} tensor on {data.device}, "
                f"needed a contiguous {spec.dtype} tensor in host memory."
            )
        data = data.detach().reshape(-1).view(torch.uint8).numpy()
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise CheckpointError(f"Tensor {spec.name}: got an array with gaps between its elements, needed a contiguous one.")
    return view.cast("B") if view.nbytes else memoryview(b"")
