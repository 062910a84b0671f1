"""One optimizer step: norm, finiteness and clip coefficient are fixed, then the update becomes due for every shard."""

from __future__ import annotations

import math
from collections.abc import Sequence

from infinity.engine.agreement import Agreement
from infinity.engine.loss_scaler import LossScaler
from infinity.engine.lr_schedule import LrSchedule
from infinity.engine.optimizer import Optimizer
from infinity.engine.results import UpdateResult
from infinity.engine.update_rule import UpdateRule
from infinity.engine.user_writes import UserWrites
from infinity.engine.waiting_gradients import WaitingGradients
from infinity.errors import Diverged
from infinity.optim.grad_norm import clip_coefficient, global_norm
from infinity.optim.stream import UpdateStream
from infinity.zero.reduction import RankReduction
from infinity.zero.shard import Residency, Shard
from infinity.zero.weights import Weights


class Updater:
    """Takes optimizer steps. Resident shards are updated at once; the others when their weights are next asked for."""

    def __init__(
        self,
        *,
        shards: Sequence[Shard],
        gradients: WaitingGradients,
        user_writes: UserWrites,
        stream: UpdateStream,
        weights: Weights,
        rule: UpdateRule,
        optimizer: Optimizer,
        lr_schedule: LrSchedule,
        loss_scaler: LossScaler,
        agreement: Agreement,
        reduction: RankReduction | None,
        max_norm: float,
        max_skipped_in_a_row: int,
    ) -> None:
        self._shards = shards
        self._gradients = gradients
        self._user_writes = user_writes
        self._stream = stream
        self._weights = weights
        self._rule = rule
        self._optimizer = optimizer
        self._lr_schedule = lr_schedule
        self._loss_scaler = loss_scaler
        self._agreement = agreement
        self._reduction = reduction
        self._max_norm = max_norm
        self._max_skipped_in_a_row = max_skipped_in_a_row
        self._num_skipped_in_a_row = 0  # with one loss scale: a lower one is a new chance

    def step(self, losses: Sequence[float] = (), shares: Sequence[float] = ()) -> UpdateResult:
        """Fix the step from the gradients that wait, and begin it; a non-finite one skips it before anything is touched.

        `losses` are those of this rank's micro-batches and `shares` their part in the mean over all ranks.
        Raises ConfigError for hyper-parameters that are wrong on a rank or not those of all, and Diverged instead of one
        skip too many; nothing is touched then.
        """
        with self._agreement.together("hyper-parameters"):
            self._optimizer.require_groups()
            self._lr_schedule.apply(self._optimizer.param_groups)
            begin = self._rule.fix()
        lr = self._lr_schedule.lr
        settings = {"gradient_clipping": self._max_norm, **self._optimizer.numbers()}
        agreed = self._agreement.step(self._gradients.take_facts(), losses, shares, settings)
        facts = agreed.gradients
        scale = self._loss_scaler.scale
        norm = global_norm(facts.sums_of_squares) / scale
        if not math.isfinite(norm):
            self._count_skip(facts.first_not_finite)
            return UpdateResult(norm, 0.0, lr, scale, True, facts.first_not_finite, agreed.losses, agreed.loss)
        self._num_skipped_in_a_row = 0
        self._loss_scaler.applied()
        coefficient = clip_coefficient(norm, self._max_norm) if self._max_norm > 0 else 1.0
        self.finish_pending()
        if self._user_writes.waiting:
            self._stream.drain()
            self._user_writes.take_in()
        steps = self._count(facts.touched)
        begin(steps, coefficient / scale)
        self._weights.updates_are_due(sorted(steps))
        self._weights.update_now([shard.index for shard in self._shards if shard.residency is Residency.RESIDENT])
        self._optimizer.stepped()
        self._lr_schedule.advance()
        self._weights.rewind()
        return UpdateResult(norm, coefficient, lr, scale, False, None, agreed.losses, agreed.loss)

    def finish_pending(self) -> None:
        """Make the updates that the step before left, for units that were not called since."""
        self._weights.update_now([shard.index for shard in self._shards])

    def drain(self) -> None:
        """Make them and wait until every tile and weight that an update changed is where it lives. Raises StorageError."""
        self.finish_pending()
        self._stream.drain()
        self._user_writes.take_in()

    def share_touched(self) -> None:
        """Let the gradients that other ranks have count here, before they are read or set."""
        self._gradients.share_touched(self._agreement.touched(self._gradients.touched))

    def discard(self) -> None:
        """Forget the gradients of a step that failed."""
        if self._reduction is not None:
            self._reduction.discard()
        self._gradients.discard()

    def _count_skip(self, parameter: str | None) -> None:
        scale = self._loss_scaler.scale
        if not self._loss_scaler.overflowed():
            self._num_skipped_in_a_row = 0
            raise Diverged(
                f"The gradient is not finite although the loss scale is {scale:g}, the lowest that fp16.min_loss_scale "
                f"allows; backward met the first such element at {parameter}.",
                remedy="The weights are those of the last step that was applied. Look for values beyond 65504 or NaN in the "
                "data and the weights, go on from an earlier checkpoint with a lower learning rate, or train in bf16.",
            )
        if self._loss_scaler.scale < scale:
            self._num_skipped_in_a_row = 0
            return
        self._num_skipped_in_a_row += 1
        if self._num_skipped_in_a_row < self._max_skipped_in_a_row:
            return
        num_skipped, self._num_skipped_in_a_row = self._num_skipped_in_a_row, 0
        raise Diverged(
            f"{num_skipped} steps in a row had gradients that are not finite, so none of them was applied; in the last "
            f"one backward met the first at {parameter}.",
            remedy="The weights are those of the last step that was applied. Go on from an earlier checkpoint with a lower "
            f"learning rate, look at the data, or set infinity.max_skipped_in_a_row higher{_or_in_bf16(scale)}.",
        )

    def _count(self, touched: dict[int, frozenset[str]]) -> dict[int, dict[str, int]]:
        """Advance the step count of every touched parameter; return the counts by shard."""
        counts = self._optimizer.steps
        for parameters in touched.values():
            for name in parameters:
                counts[name] = counts.get(name, 0) + 1
        return {shard: {name: counts[name] for name in sorted(names)} for shard, names in touched.items()}


def _or_in_bf16(loss_scale: float) -> str:
    return "" if loss_scale == 1 else "; training in bf16 needs no loss scale"
