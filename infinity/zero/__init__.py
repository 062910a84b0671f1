"""Units, flat shards, gathered weights, the unit's autograd node, and the two schedules. Knows no optimizer."""

from infinity.not_offered import missing
from infinity.zero.estimators import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from infinity.zero.gathered import GatheredParameters
from infinity.zero.init import Init

__all__ = [
    "GatheredParameters",
    "Init",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]


def __getattr__(name: str) -> object:
    raise missing("infinity.zero", name)
