"""Units, flat shards, gathered weights, the unit's autograd node, and the two schedules. Knows no optimizer."""

from infinity.zero.gathered import GatheredParameters
from infinity.zero.init import Init

__all__ = ["GatheredParameters", "Init"]
