"""Units and run state for the checkpoint tests; every element can be told from (step, tensor, position)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from infinity.checkpoint.manifest import CheckpointState, Counters, Fingerprint
from infinity.checkpoint.reader import Checkpoint
from infinity.checkpoint.specs import TensorSpec, tensor_name

PARAMETERS = {
    "embed": (TensorSpec("embed.weight", "bfloat16", (31, 7)),),
    "block": (TensorSpec("block.fc.weight", "bfloat16", (5, 9, 3)), TensorSpec("block.scale", "float32", ())),
}
PLANES = {"bfloat16": (("master_low", "int16"), ("exp_avg", "float32"), ("exp_avg_sq", "float32")),
          "float32": (("exp_avg", "float32"), ("exp_avg_sq", "float32"))}  # fmt: skip


def content(step: int, spec: TensorSpec) -> bytes:
    """Return the bytes that a tensor has at a step."""
    seed = zlib.crc32(f"{step} {spec.name}".encode())
    return np.random.default_rng(seed).bytes(spec.num_bytes)


def state_specs(parameter: TensorSpec) -> tuple[TensorSpec, ...]:
    """Return every tensor that is stored for a trainable parameter."""
    stored = (("weight", parameter.dtype), *PLANES[parameter.dtype])
    return tuple(TensorSpec(tensor_name(kind, parameter.name), dtype, parameter.shape) for kind, dtype in stored)


@dataclass
class FakeUnit:
    """Gives its tensors in pieces of `tile` elements, tile by tile over all of them; `before` runs before each piece."""

    name: str
    specs: tuple[TensorSpec, ...]
    step: int
    tile: int = 128
    before: Callable[[int], None] = field(default=lambda index: None)

    def pieces(self) -> Iterator[tuple[str, int, memoryview]]:
        index = 0
        for first in range(0, max(spec.numel for spec in self.specs), self.tile):
            for spec in self.specs:
                count = min(self.tile, spec.numel - first)
                if count > 0:
                    self.before(index)
                    begin = first * spec.element_bytes
                    yield spec.name, first, memoryview(content(self.step, spec))[begin : begin + count * spec.element_bytes]
                    index += 1


def fake_units(step: int, before: Callable[[int], None] = lambda index: None) -> list[FakeUnit]:
    """Return the two units of the fake model at a step."""
    return [
        FakeUnit(name, tuple(stored for spec in specs for stored in state_specs(spec)), step, before=before)
        for name, specs in PARAMETERS.items()
    ]


def fake_buffers(step: int) -> FakeUnit:
    """Return the module buffers of the fake model at a step."""
    return FakeUnit("buffers", (TensorSpec("buffer/norm.running_mean", "float32", (9,)),), step)


def fake_state(step: int) -> CheckpointState:
    """Return the run's state at a step."""
    parameters = tuple(spec for specs in PARAMETERS.values() for spec in specs)
    counters = Counters(step, step - 1, 1, step - 1, {spec.name: step - 1 for spec in parameters})
    return CheckpointState(
        Fingerprint(parameters, {"head.weight": "embed.weight"}), "bf16", counters,
        data_position={"epoch": 1, "offset": step * 7}, rng_state=["mt", [2**63 + step, 5]],
    )  # fmt: skip


def require_content(checkpoint: Checkpoint) -> None:
    """Compare every byte of every tensor with what the checkpoint's step should hold."""
    step = checkpoint.manifest.step
    assert checkpoint.state == fake_state(step)
    expected = [spec for unit in (*fake_units(step), fake_buffers(step)) for spec in unit.specs]
    for spec in expected:
        kind, _, parameter = spec.name.partition("/")
        found = bytearray(spec.num_bytes)
        checkpoint.read(parameter, kind, 0, spec.numel, found)
        assert bytes(found) == content(step, spec), spec.name


def names_in(directory: Path) -> list[str]:
    """Return the sorted names in a directory."""
    return sorted(path.name for path in directory.iterdir())
