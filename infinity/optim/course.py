"""From the section `scheduler` to the course of a parameter group: its learning rate, and its momentum where that moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infinity.config.scheduler import SchedulerSection
from infinity.errors import ConfigError
from infinity.optim.cycles import Cycle, range_test
from infinity.optim.schedules import Schedule, build_schedule
from infinity.optim.warmup import warmup, warmup_cosine, warmup_decay

_NEEDS_LENGTH = ("linear", "cosine", "WarmupDecayLR", "WarmupCosineLR")


@dataclass(frozen=True, slots=True)
class Course:
    """What step k, counted from 0 over the applied steps, uses."""

    lr: Schedule
    beta1: Schedule | None = None  # None: what the group says


def build_course(section: SchedulerSection, *, group_lr: float, num_steps: int | None) -> Course:
    """Return the course of a group whose own learning rate is `group_lr`: the peak, where the section names none.

    `section` is what `SchedulerSection.of_group` gives for the group.
    `num_steps` is the length of the run, for types whose total_num_steps is not given. Raises ConfigError where a type
    needs a length and there is none, and for a warm-up that begins above its end.
    """
    values = section.values()
    total = values.get("total_num_steps") or num_steps
    if section.type in _NEEDS_LENGTH and not total:
        raise ConfigError(
            f"scheduler.type is {section.type}, but nothing says how long the run is.",
            remedy="Set scheduler.params.total_num_steps, or give initialize(num_steps=...).",
        )
    match section.type:
        case "OneCycle":
            return _one_cycle(values)
        case "LRRangeTest":
            return Course(
                range_test(
                    min_lr=values["lr_range_test_min_lr"],
                    num_interval_steps=values["lr_range_test_step_size"],
                    rate=values["lr_range_test_step_rate"],
                    in_stairs=values["lr_range_test_staircase"],
                )
            )
        case "WarmupLR" | "WarmupDecayLR" | "WarmupCosineLR":
            return Course(_warmup(section.type, values, group_lr, total or 0))
        case _:
            num_warmup_steps = values["warmup_num_steps"]
            return Course(
                build_schedule(
                    section.type,
                    peak_lr=group_lr,
                    num_steps=max(total or 0, num_warmup_steps, 1),
                    num_warmup_steps=num_warmup_steps,
                    min_ratio=values["min_ratio"],
                )
            )


def _warmup(name: str, values: dict[str, Any], group_lr: float, num_steps: int) -> Schedule:
    num_warmup_steps, kind = values["warmup_num_steps"], values["warmup_type"]
    if name == "WarmupCosineLR":
        return warmup_cosine(
            peak_lr=group_lr,
            min_ratio=values["warmup_min_ratio"],
            end_ratio=values["cos_min_ratio"],
            num_warmup_steps=num_warmup_steps,
            num_steps=num_steps,
            kind=kind,
        )
    least, most = values["warmup_min_lr"], values["warmup_max_lr"]
    most = group_lr if most is None else most
    if least > most:
        raise ConfigError(
            f"scheduler.params: warmup_min_lr {least:g} is more than the optimizer's lr {most:g}, to which it rises.",
            remedy="Lower it, or set scheduler.params.warmup_max_lr.",
        )
    if name == "WarmupLR":
        return warmup(min_lr=least, max_lr=most, num_warmup_steps=num_warmup_steps, kind=kind)
    return warmup_decay(min_lr=least, max_lr=most, num_warmup_steps=num_warmup_steps, num_steps=num_steps, kind=kind)


def _one_cycle(values: dict[str, Any]) -> Course:
    up, down = values["cycle_first_step_size"], values["cycle_second_step_size"]
    up_stairs, down_stairs = values["cycle_first_stair_count"], values["cycle_second_stair_count"]
    cycle = Cycle(
        num_up_steps=up,
        num_down_steps=up if down is None else down,
        num_up_stairs=up_stairs,
        num_down_stairs=up_stairs if down_stairs is None else down_stairs,
        num_decay_steps=values["decay_step_size"],
    )
    lr = cycle.lr(min_lr=values["cycle_min_lr"], max_lr=values["cycle_max_lr"], decay_rate=values["decay_lr_rate"])
    if not values["cycle_momentum"]:
        return Course(lr)
    return Course(lr, cycle.momentum(min_momentum=values["cycle_min_mom"], max_momentum=values["cycle_max_mom"]))
