"""The section `scheduler`: the course of the learning rate, under the names of DeepSpeed's schedulers and our own."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from infinity.config.section import Beta, Count, Rate, Rates, Section, Share, WholeNumber
from infinity.errors import ConfigError

SchedulerType = Literal[
    "constant", "linear", "cosine", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"
]
_OWN: dict[str, object] = {"warmup_num_steps": 0, "total_num_steps": None, "min_ratio": 0.0}
_WARMUP: dict[str, object] = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"}
# The parameters of each type with their defaults; DeepSpeed's are those of its public documentation.
PARAMS_OF_TYPE: dict[str, dict[str, object]] = {
    "constant": _OWN,
    "linear": _OWN,
    "cosine": _OWN,
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {"total_num_steps": None, **_WARMUP},
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 1e-4,
        "warmup_type": "log",
    },
    "OneCycle": {
        "cycle_min_lr": None,
        "cycle_max_lr": None,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
}
DEEPSPEED_TYPES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
_STEPS = ("warmup_num_steps", "total_num_steps")
_IN_ORDER = (
    ("warmup_min_lr", "warmup_max_lr"),
    ("cycle_min_lr", "cycle_max_lr"),
    ("cycle_min_mom", "cycle_max_mom"),
)
# The parameter that, where it is given, stands for `optimizer.params.lr`.
PEAK_OF_TYPE = {
    "WarmupLR": "warmup_max_lr",
    "WarmupDecayLR": "warmup_max_lr",
    "OneCycle": "cycle_max_lr",
    "LRRangeTest": "lr_range_test_min_lr",
}


class SchedulerParams(Section):
    """`scheduler.params`: those of every type; None where the type has no such parameter, or no value for it."""

    total_num_steps: Count | None = None  # None: the steps of the run, where the type needs them
    warmup_num_steps: WholeNumber | None = None
    min_ratio: Share | None = None  # the learning rate at the end, as a share of its peak
    warmup_min_lr: Rates | None = None
    warmup_max_lr: Rates | None = None  # None: optimizer.params.lr
    warmup_type: Literal["log", "linear"] | None = None
    warmup_min_ratio: Share | None = None
    cos_min_ratio: Share | None = None
    cycle_min_lr: Rate | None = None
    cycle_max_lr: Rate | None = None
    decay_lr_rate: Rate | None = None
    cycle_first_step_size: Count | None = None  # steps up
    cycle_second_step_size: Count | None = None  # steps down; None: as many as up
    cycle_first_stair_count: WholeNumber | None = None  # 0: no stairs
    cycle_second_stair_count: WholeNumber | None = None  # None: as many as in the first half
    decay_step_size: WholeNumber | None = None  # 0: no decay after the cycle
    cycle_momentum: bool | None = None
    cycle_min_mom: Beta | None = None
    cycle_max_mom: Beta | None = None
    lr_range_test_min_lr: Rates | None = None
    lr_range_test_step_size: Count | None = None
    lr_range_test_step_rate: Rate | None = None
    lr_range_test_staircase: bool | None = None


class SchedulerSection(Section):
    """`scheduler`: the learning rate over the applied steps."""

    type: SchedulerType = "constant"
    params: SchedulerParams = SchedulerParams(warmup_num_steps=0, min_ratio=0.0)

    @model_validator(mode="before")
    @classmethod
    def _fill_params(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        defaults = PARAMS_OF_TYPE.get(str(values.get("type", "constant")))
        params = values.get("params", {})
        if defaults is None or not isinstance(params, dict):
            return values
        return {**values, "params": defaults | {name: value for name, value in params.items() if value is not None}}

    @model_validator(mode="after")
    def _check_params(self) -> SchedulerSection:
        own = PARAMS_OF_TYPE[self.type]
        for name, value in self.params:
            if value is not None and name not in own:
                raise ValueError(f"type {self.type} has no parameter {name}; it has {', '.join(own)}")
        missing = [name for name in ("cycle_min_lr", "cycle_max_lr") if name in own and getattr(self.params, name) is None]
        if missing:
            raise ValueError(f"type {self.type} needs {' and '.join(missing)}")
        for low, high in _IN_ORDER if self.type in DEEPSPEED_TYPES else (*_IN_ORDER, _STEPS):
            for least, most in _pairs(getattr(self.params, low), getattr(self.params, high)):
                if least > most:
                    raise ValueError(f"params: {low} {least:g} is more than {high} {most:g}")
        return self

    def values(self) -> dict[str, Any]:
        """Return the parameters that this type has."""
        return {name: getattr(self.params, name) for name in PARAMS_OF_TYPE[self.type]}

    def of_group(self, index: int, num_groups: int) -> SchedulerSection:
        """Return what the section says to one parameter group: lists have one number for each.

        Raises ConfigError for a list of another length.
        """
        lists = {name: value for name, value in self.params if isinstance(value, tuple)}
        for name, value in lists.items():
            if len(value) != num_groups:
                raise ConfigError(
                    f"scheduler.params.{name} has {len(value)} numbers; there are {num_groups} parameter groups.",
                    remedy="Give one number for each group, or one for all.",
                )
        params = self.params.model_copy(update={name: value[index] for name, value in lists.items()})
        return self.model_copy(update={"params": params})


def _pairs(low: Any, high: Any) -> list[tuple[Any, Any]]:
    """Return what belongs together of two numbers or lists; nothing where one is missing or the lists differ in length."""
    if low is None or high is None:
        return []
    num = max(len(value) if isinstance(value, tuple) else 1 for value in (low, high))
    lows, highs = (value if isinstance(value, tuple) else (value,) * num for value in (low, high))
    return list(zip(lows, highs, strict=False))
