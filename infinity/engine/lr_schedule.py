"""The learning rate over the applied steps: from the section `scheduler`, or from the user's scheduler of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from infinity.config.scheduler import SchedulerSection
from infinity.errors import ConfigError
from infinity.optim.course import Course, build_course

Group = dict[str, object]
GivenScheduler = LRScheduler | Callable[[torch.optim.Optimizer], LRScheduler]
_MOVED = ("lr", "betas", "momentum")  # what a scheduler may move in a group


class LrSchedule(Protocol):
    """What an engine asks of a schedule. Skipped steps do not advance it."""

    num_applied_steps: int  # a checkpoint keeps it, and setting it moves the schedule there

    @property
    def lr(self) -> float:
        """The learning rate of the next step, of the first group."""
        ...

    def get_last_lr(self) -> list[float]:
        """Return the learning rate in force for each group, as torch's schedulers do."""
        ...

    def apply(self, groups: Sequence[Group]) -> None:
        """Write what the next step uses into the optimizer's groups."""
        ...

    def advance(self) -> None:
        """Count an applied step."""
        ...


@dataclass(slots=True)
class CourseSchedule:
    """The schedule that the configuration describes: one course for each parameter group."""

    courses: tuple[Course, ...]
    num_applied_steps: int = 0

    @property
    def lr(self) -> float:
        return self.courses[0].lr(self.num_applied_steps)

    def get_last_lr(self) -> list[float]:
        return [course.lr(self.num_applied_steps) for course in self.courses]

    def apply(self, groups: Sequence[Group]) -> None:
        for group, course in zip(groups, self.courses, strict=True):
            group["lr"] = course.lr(self.num_applied_steps)
            if course.beta1 is not None and "betas" in group:
                group["betas"] = (course.beta1(self.num_applied_steps), _second_beta(group))

    def advance(self) -> None:
        self.num_applied_steps += 1


@dataclass(slots=True)
class FreeRates:
    """No schedule: the learning rates are what the user, or a scheduler of torch, writes into the groups."""

    groups: Sequence[Group]
    num_applied_steps: int = 0

    @property
    def lr(self) -> float:
        return self.get_last_lr()[0]

    def get_last_lr(self) -> list[float]:
        """Raises ConfigError for what is no number."""
        return [_rate(group) for group in self.groups]

    def apply(self, groups: Sequence[Group]) -> None:
        """Nothing to write."""

    def advance(self) -> None:
        self.num_applied_steps += 1


class TorchSchedule:
    """A scheduler of torch over groups that look like the engine's; it steps once for each applied step."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        self._groups: list[dict[str, Any]] = scheduler.optimizer.param_groups
        self._start = deepcopy(scheduler.state_dict())
        self._moved_at_start = [{name: group[name] for name in _MOVED if name in group} for group in self._groups]
        self._num_applied_steps = 0

    @property
    def num_applied_steps(self) -> int:
        return self._num_applied_steps

    @num_applied_steps.setter
    def num_applied_steps(self, number: int) -> None:
        """Go back to the start and step again: what schedulers keep of their past differs between them."""
        self.scheduler.load_state_dict(deepcopy(self._start))
        for group, moved in zip(self._groups, self._moved_at_start, strict=True):
            group.update(moved)
        self._num_applied_steps = 0
        for _ in range(number):
            self.advance()

    @property
    def lr(self) -> float:
        return float(self._groups[0]["lr"])

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups]

    def apply(self, groups: Sequence[Group]) -> None:
        for group, seen in zip(groups, self._groups, strict=True):
            group.update({name: seen[name] for name in _MOVED if name in seen})

    def advance(self) -> None:
        self.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]  # the engine made its step
        self.scheduler.step()
        self._num_applied_steps += 1


class ScheduledGroups(torch.optim.Optimizer):
    """What a function that makes a scheduler is given: the engine's groups, with a number for the parameters."""

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__([{**group, "params": [torch.zeros(1)]} for group in groups], defaults=dict(groups[0]))


def build_schedule_of(section: SchedulerSection, groups: Sequence[Group], num_steps: int | None) -> LrSchedule:
    """Return the schedule of the configuration over these groups.

    Raises ConfigError as `build_course` does, and for a list of numbers that are not as many as the groups.
    """
    if section.type == "constant" and not section.params.warmup_num_steps:
        return FreeRates(groups)
    courses = [
        build_course(
            section.of_group(index, len(groups)),
            group_lr=float(group["lr"]),  # type: ignore[arg-type]
            num_steps=num_steps,
        )
        for index, group in enumerate(groups)
    ]
    return CourseSchedule(tuple(courses))


def build_torch_schedule(given: GivenScheduler, groups: Sequence[Group]) -> TorchSchedule:
    """Return the schedule of a scheduler of torch, or of a function that makes one over an optimizer with these groups.

    Raises ConfigError for anything else, for one that steps on a metric, and for one over another number of groups.
    """
    if not callable(given) and not isinstance(given, LRScheduler):
        raise ConfigError(
            f"lr_scheduler: {type(given).__name__} is neither a scheduler of torch nor a function that makes one.",
            remedy="Give for example lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, shape).",
        )
    scheduler = given if isinstance(given, LRScheduler) else given(ScheduledGroups(groups))
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"lr_scheduler: {type(scheduler).__name__} cannot be stepped once for each applied step.",
            remedy="Give one of torch.optim.lr_scheduler that steps without a metric.",
        )
    num_moved = len(scheduler.optimizer.param_groups)
    if num_moved != len(groups):
        raise ConfigError(
            f"lr_scheduler: it moves {num_moved} parameter groups, the engine has {len(groups)}.",
            remedy="Give a function that makes it over the optimizer that it is called with.",
        )
    return TorchSchedule(scheduler)


def _rate(group: Group) -> float:
    value = group.get("lr")
    if not isinstance(value, int | float | torch.Tensor):
        raise ConfigError(f"optimizer.param_groups: lr is {value!r}, not a number.", remedy="Set it before the next step.")
    return float(value)


def _second_beta(group: Group) -> object:
    betas = group["betas"]
    return betas[1] if isinstance(betas, tuple | list) and len(betas) == 2 else betas
