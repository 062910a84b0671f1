"""The buffers of the Adam benchmark: one arena that every path, kernel and competitor works on in turn."""

from __future__ import annotations

import torch

from infinity.bench.adam_paths import AdamPath
from infinity.memory.arena import Arena, Buffer, open_arena
from infinity.memory.ledger import Ledger
from infinity.optim.kernel import AdamArrays
from infinity.states import Tier

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int16": torch.int16}
_PATTERN_ELEMENTS = 1 << 18
# Standard deviations as a model in training has them; the second moment gets squares.
_SCALES = {"weights": 2e-2, "grad": 1e-3, "exp_avg": 1e-3, "exp_avg_sq": 1e-3}


class AdamData:
    """The streams of any path, one after the other from the buffer's start. Its opener closes the arena."""

    def __init__(self, buffer: Buffer, num_parameters: int) -> None:
        self._buffer = buffer
        self.num_parameters = num_parameters

    def arrays(self, path: AdamPath) -> AdamArrays:
        """Return the addresses of the path's streams."""
        return path.arrays(self._buffer.address, self.num_parameters)

    def tensor(self, path: AdamPath, name: str) -> torch.Tensor:
        """Return one stream of the path, 1-D [num_parameters], sharing the memory."""
        dtype = next(_DTYPES[stream.dtype] for stream in path.streams if stream.name == name)
        return self._buffer.tensor(dtype, self.num_parameters, path.offset(name, self.num_parameters))

    def fill(self, path: AdamPath) -> None:
        """Give every stream ordinary values: subnormal, huge or equal ones would be another benchmark."""
        generator = torch.Generator().manual_seed(0)
        for stream in path.streams:
            if stream.dtype == "int16":
                pattern = torch.randint(-(1 << 15), 1 << 15, (_PATTERN_ELEMENTS,), generator=generator, dtype=torch.int16)
            else:
                pattern = torch.randn(_PATTERN_ELEMENTS, generator=generator) * _SCALES.get(stream.name, 1.0)
                if stream.name == "exp_avg_sq":
                    pattern.square_()
            values = self.tensor(path, stream.name)
            for begin in range(0, values.numel(), _PATTERN_ELEMENTS):
                part = values[begin : begin + _PATTERN_ELEMENTS]
                part.copy_(pattern[: part.numel()])


def open_adam_data_arena(num_parameters: int, paths: tuple[AdamPath, ...]) -> Arena:
    """Return an arena that is large enough for every one of `paths`. Raises OverBudget where the system refuses it."""
    num_bytes = num_parameters * max(path.bytes_held for path in paths)
    return open_arena(num_bytes, ledger=Ledger({}), tier=Tier.CPU, owner="Adam benchmark", pin=False)
