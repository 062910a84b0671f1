"""What ranks do to see that spilled sums change nothing: train with gradients in RAM or on NVMe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kit import kit_of, open_engine
from rank_checkpoints import Seen, seen, take

from infinity.placement import Placement


def train_with_gradients_on(tier: str, kit: str, config: Mapping[str, Any]) -> Seen:
    """Take three steps; say how many gradient slots there are."""
    with open_engine(kit_of(kit).build(), config, placement=Placement().override("*", grads=tier)) as engine:
        losses = take(engine, kit_of(kit), config, range(3))
        return seen(engine, losses, slots=engine.plan.num_gradient_slots)
