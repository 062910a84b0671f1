"""What the user may ask for, and how patterns choose units."""

from __future__ import annotations

import pytest
from planner_cases import decoder_400m

from infinity.config import Config
from infinity.errors import ConfigError
from infinity.placement import PARTITIONED, Placement, UnitPlacement, is_partitioned
from infinity.states import StateKind, Tier

UNITS = decoder_400m()


def chosen(placement: Placement) -> dict[str, UnitPlacement]:
    return dict(zip([unit.name for unit in UNITS], placement.resolve(UNITS), strict=True))


def test_stages_partition_one_state_more_each() -> None:
    """Stage 0 partitions nothing, then optimizer states, gradients and parameters join."""
    assert [len(PARTITIONED[stage]) for stage in range(4)] == [0, 1, 2, 3]
    assert is_partitioned(1, StateKind.OPTIM)
    assert not is_partitioned(2, StateKind.PARAM)


@pytest.mark.parametrize(
    ("device", "tier"), [("none", Tier.GPU), ("gpu", Tier.GPU), ("cpu", Tier.CPU), ("nvme", Tier.NVME), ("auto", "auto")]
)
def test_offload_sections_become_the_default(device: str, tier: Tier | str) -> None:
    """`none` is the compute tier, and a tier switches without any other change (C139)."""
    section = {"device": device, "nvme_path": "/x"}
    config = Config.from_any({"zero_optimization": {"stage": 3, "offload_optimizer": section, "offload_param": section}})
    placement = Placement.from_config(config)
    assert placement.stage == 3
    assert placement.default.params == tier
    assert placement.default.optim == (tier if tier == "auto" else ((tier, 1.0),))
    assert placement.default.grads == "auto"


def test_ratio_is_the_offloaded_share() -> None:
    """`ratio` leaves the rest of the optimizer state on the compute tier; without a device it is an error."""
    section = {"device": "cpu", "ratio": 0.75}
    placement = Placement.from_config(Config.from_any({"zero_optimization": {"offload_optimizer": section}}))
    assert placement.default.optim == ((Tier.GPU, 0.25), (Tier.CPU, 0.75))
    with pytest.raises(ConfigError, match="ratio"):
        Placement.from_config(Config.from_any({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}))


def test_patterns_choose_units_by_parameter_or_unit_name() -> None:
    """A glob over parameters or over units chooses whole units; others keep the default."""
    by_parameter = chosen(Placement().override("blocks.[0-3].*", params="cpu"))
    by_unit = chosen(Placement().override("blocks.[0-3]", params="cpu"))
    assert by_parameter == by_unit
    assert [name for name, unit in by_unit.items() if unit.params is Tier.CPU] == [f"blocks.{i}" for i in range(4)]


def test_later_overrides_win_state_by_state() -> None:
    """A later override replaces only what it names, and `auto` gives a state back to the planner."""
    placement = Placement().override("*", params="nvme", optim="nvme").override("blocks.1", optim="cpu", params="auto")
    units = chosen(placement)
    assert units["blocks.1"] == UnitPlacement(params="auto", optim=((Tier.CPU, 1.0),))
    assert units["blocks.2"] == UnitPlacement(params=Tier.NVME, optim=((Tier.NVME, 1.0),))


def test_override_leaves_the_placement_it_starts_from() -> None:
    """A Placement is a value."""
    base = Placement()
    assert base.override("*", params="cpu") != base == Placement()


def test_a_pattern_without_a_match_names_near_ones() -> None:
    """A pattern that matches nothing is an error with near names (C135)."""
    with pytest.raises(ConfigError, match=r"'block\.1' matches no unit.*'blocks\.1'"):
        Placement().override("block.1", params="cpu").resolve(UNITS)


def test_a_pattern_over_a_part_of_a_unit_is_an_error() -> None:
    """Placement is per unit: a pattern that matches only some of its parameters names one that it misses."""
    with pytest.raises(ConfigError, match=r"matches 1 of 2 parameters of unit 'embed'.*not 'embed\.bias'"):
        Placement().override("*.weight", params="cpu").resolve(UNITS)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"optim": {"cpu": 0.5, "nvme": 0.4}}, "sum to 0.9, not to 1"),
        ({"optim": {"cpu": 1.5, "nvme": -0.5}}, "the share 1.5 of cpu is not between 0 and 1"),
        ({"optim": {"cpu": float("nan")}}, "the share nan of cpu"),
        ({"optim": {}}, "sum to 0, not to 1"),
        ({"optim": "nvm"}, "'nvm' is no tier; did you mean 'nvme'?"),
        ({"optim": {"disk": 1.0}}, "'disk' is no tier"),
        ({"optim": 3}, "3 is neither a tier nor shares"),
        ({"params": {"cpu": 0.5, "nvme": 0.5}}, "params live whole in one tier"),
        ({"grads": {"cpu": 0.5, "nvme": 0.5}}, "grads live whole in one tier"),
        ({}, "asks for nothing"),
    ],
)
def test_bad_requests_say_what_is_wrong(asked: dict[str, object], sentence: str) -> None:
    """Shares, tiers and splits that are no placement are errors with the value in them."""
    with pytest.raises(ConfigError) as caught:
        Placement().override("*", **asked)  # type: ignore[arg-type]
    assert sentence in str(caught.value)
