"""Types of the native module that csrc/cpu_adam builds; infinity.optim.kernel is the only one to use it."""

from collections.abc import Sequence
from enum import Enum

BLOCK_ELEMENTS: int

class GradFormat(Enum):
    fp32 = 0
    bf16 = 1
    fp16 = 2

class MasterFormat(Enum):
    fp32 = 0
    split_bf16 = 1
    fp32_out_bf16 = 2
    fp32_out_fp16 = 3

class AdamScalars:
    def __init__(
        self,
        *,
        coefficient: float,
        decay: float,
        l2: float,
        beta2: float,
        lerp_weight: float,
        square_weight: float,
        root_correction: float,
        eps: float,
        step_size: float,
    ) -> None: ...

class Arrays:
    def __init__(self, *, weights: int, low: int, out: int, states: tuple[int, int], grad: int) -> None: ...

class Run:
    def __init__(self, start: int, length: int, source: int, grad_format: GradFormat) -> None: ...

class CpuAdam:
    def __init__(self, name: str, *, num_threads: int, share_index: int, num_shares: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def num_threads(self) -> int: ...
    def update(
        self, master: MasterFormat, grad_format: GradFormat, num_elements: int, arrays: Arrays, scalars: AdamScalars
    ) -> None: ...
    def traffic(
        self, master: MasterFormat, grad_format: GradFormat, num_elements: int, arrays: Arrays, mask: int
    ) -> None: ...
    def sums_of_squares(self, grad_format: GradFormat, num_elements: int, *, grad: int, sums: int) -> bool: ...
    def arrive(self, runs: Sequence[Run], grad_format: GradFormat, num_elements: int, *, grad: int, sums: int) -> bool: ...

def names() -> list[str]: ...
def requirements() -> dict[str, str]: ...
