"""What a model consists of, as names and shapes: its units and their parameters, before any tensor exists; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from infinity.errors import ConfigError
from infinity.models.presets import PRESETS, GPTConfig, parameter_count, preset

Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # (full name, shape) of each parameter
ROOT = "root"


@dataclass(frozen=True, slots=True)
class UnitShape:
    """Parameters that are moved together."""

    name: str
    parameters: Shapes
    is_block: bool = False  # one of the equal ones in the middle
    visits: int = 1  # calls that need it in one micro-batch; a tied embedding serves the head, too

    @property
    def is_root(self) -> bool:
        """Whether these are the parameters of no unit."""
        return self.name == ROOT

    @property
    def num_parameters(self) -> int:
        return sum(prod(shape) for _, shape in self.parameters)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's units in forward order, the root last."""

    name: str
    units: tuple[UnitShape, ...]
    decoder: GPTConfig  # what its activations are estimated from
    note: str = ""  # what is not known of it and had to be assumed

    @property
    def num_parameters(self) -> int:
        return sum(unit.num_parameters for unit in self.units)

    @property
    def largest_layer_parameters(self) -> int:
        """The parameters of the largest unit."""
        return max(unit.num_parameters for unit in self.units)


def preset_shape(name: str) -> ModelShape:
    """Return the shape of a built-in decoder (models/gpt.py). Raises ConfigError for an unknown preset."""
    gpt = preset(name)
    return ModelShape(name, tuple(_gpt_units(gpt)), gpt)


def counted_shape(num_parameters: int) -> ModelShape:
    """Return the shape of a decoder of which only the number of parameters is known: cut like the nearest preset.

    Its blocks have equal shares, and the total is exact. Raises ConfigError for fewer parameters than a preset has units.
    """
    nearest = min(PRESETS, key=lambda name: abs(parameter_count(PRESETS[name]) - num_parameters))
    like = preset_shape(nearest)
    if num_parameters < 1000 * len(like.units):
        raise ConfigError(f"--parameters: {num_parameters} is too small for a model.", remedy="Give for example 7e9.")
    scale = num_parameters / like.num_parameters
    counts = [max(1, round(unit.num_parameters * scale)) for unit in like.units]
    largest = max(range(len(counts)), key=counts.__getitem__)
    counts[largest] += num_parameters - sum(counts)
    units = tuple(
        UnitShape(unit.name, ((f"{unit.name}.parameters", (count,)),), is_block=unit.is_block)
        for unit, count in zip(like.units, counts, strict=True)
    )
    note = f"Only the number of parameters is known: units and activations are those of {nearest}, in proportion."
    return ModelShape("a decoder", units, like.decoder, note)


def _gpt_units(gpt: GPTConfig) -> Iterator[UnitShape]:
    table, norm = (gpt.vocab_size, gpt.width), (gpt.width,)
    block: Shapes = (
        ("attention_norm.weight", norm),
        ("attention.qkv.weight", (3 * gpt.width, gpt.width)),
        ("attention.out.weight", (gpt.width, gpt.width)),
        ("mlp_norm.weight", norm),
        ("mlp.gate_up.weight", (2 * gpt.hidden, gpt.width)),
        ("mlp.down.weight", (gpt.width, gpt.hidden)),
    )
    yield UnitShape("embed", (("embed.weight", table),))
    yield from repeated("blocks", gpt.num_layers, block)
    yield UnitShape("head", (("head.weight", table),))
    yield UnitShape(ROOT, (("norm.weight", norm),))


def repeated(prefix: str, number: int, parameters: Shapes) -> Iterator[UnitShape]:
    """Yield equal blocks `<prefix>.0`, `<prefix>.1`, ..."""
    for index in range(number):
        name = f"{prefix}.{index}"
        yield UnitShape(name, tuple((f"{name}.{inner}", shape) for inner, shape in parameters), is_block=True)
