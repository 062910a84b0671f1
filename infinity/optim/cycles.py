"""DeepSpeed's schedules that search and cycle: LRRangeTest and OneCycle, by the formulas of its public documentation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from infinity.optim.schedules import Schedule


def range_test(*, min_lr: float, num_interval_steps: int, rate: float, in_stairs: bool) -> Schedule:
    """Return LRRangeTest: `min_lr` (1 + `rate` x intervals so far), a straight line or one stair an interval."""

    def schedule(step: int) -> float:
        intervals = step // num_interval_steps if in_stairs else step / num_interval_steps
        return min_lr * (1.0 + rate * intervals)

    return schedule


@dataclass(frozen=True, slots=True)
class Cycle:
    """The one cycle of OneCycle (Smith, 2018): up, down, and what comes after it."""

    num_up_steps: int
    num_down_steps: int
    num_up_stairs: int  # 0: a straight line
    num_down_stairs: int
    num_decay_steps: int  # steps in which the decay grows by its rate; 0: no decay

    @property
    def num_steps(self) -> int:
        return self.num_up_steps + self.num_down_steps

    def height(self, step: int) -> float:
        """Return where a step inside the cycle stands: 0 at both ends, 1 at the top."""
        if step <= self.num_up_steps:
            return _on_stairs(step, self.num_up_steps, self.num_up_stairs)
        return _on_stairs(self.num_steps - step, self.num_down_steps, self.num_down_stairs)

    def lr(self, *, min_lr: float, max_lr: float, decay_rate: float) -> Schedule:
        """Return the learning rate: up to `max_lr`, back to `min_lr`, then `min_lr` / (1 + `decay_rate` x intervals)."""

        def after(step: int) -> float:
            intervals = (step - self.num_steps) / self.num_decay_steps if self.num_decay_steps else 0.0
            return min_lr / (1.0 + decay_rate * intervals)

        return self._course(lambda height: min_lr + (max_lr - min_lr) * height, after)

    def momentum(self, *, min_momentum: float, max_momentum: float) -> Schedule:
        """Return Adam's first beta, which goes down while the learning rate goes up, and stays at its largest after."""
        return self._course(lambda height: max_momentum - (max_momentum - min_momentum) * height, lambda step: max_momentum)

    def _course(self, inside: Callable[[float], float], after: Schedule) -> Schedule:
        return lambda step: inside(self.height(step)) if step <= self.num_steps else after(step)


def _on_stairs(step: int, num_steps: int, num_stairs: int) -> float:
    # From whole numbers: a quotient just below a stair would fall a whole one.
    return math.floor(step * num_stairs / num_steps) / num_stairs if num_stairs else step / num_steps
