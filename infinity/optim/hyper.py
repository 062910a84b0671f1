"""The hyper-parameters of an update as frozen values, and the scalars that the arithmetic takes from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.store.layout import Segment


@dataclass(frozen=True, slots=True)
class AdamScalars:
    """What is the same for all elements of a parameter: computed in double, rounded to fp32 once where it is used."""

    decay: float  # the weight is multiplied by it
    l2: float  # this share of the weight is added to the gradient
    beta2: float
    lerp_weight: float
    square_weight: float
    root_correction: float
    eps: float
    step_size: float  # negative


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """The hyper-parameters of one parameter in one step. `step` counts its updates, this one included: it starts at 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    decoupled: bool  # AdamW (Loshchilov and Hutter, 2019); else weight decay is added to the gradient

    def scalars(self) -> AdamScalars:
        """Return the scalars by the formulas of torch.optim.adam._single_tensor_adam, in double."""
        return AdamScalars(
            decay=1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            l2=0.0 if self.decoupled else self.weight_decay,
            beta2=self.beta2,
            lerp_weight=1 - self.beta1,
            square_weight=1 - self.beta2,
            root_correction=(1 - self.beta2**self.step) ** 0.5,
            eps=self.eps,
            step_size=-(self.lr / (1 - self.beta1**self.step)),
        )


@dataclass(frozen=True, slots=True)
class GroupHyper:
    """The hyper-parameters of one parameter group, as they were when the step was fixed."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool

    def at(self, step: int) -> AdamHyper:
        """Return the hyper-parameters of a parameter whose update number `step` this is."""
        return AdamHyper(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, step, self.decoupled)


@dataclass(frozen=True, slots=True)
class UpdateStep:
    """Everything that one optimizer step fixes before the first tile is updated."""

    groups: tuple[GroupHyper, ...]  # by the group index of the shard layout
    steps: Mapping[
        int, Mapping[str, int]
    ]  # shard -> parameter -> its step count, this step included; untouched ones are absent
    coefficient: float  # gradients are multiplied by it: unscale and clip
    grad_dtype: str  # "float32" | "bfloat16" | "float16"

    def hyper(self, shard: int, segment: Segment) -> AdamHyper | None:
        """Return the hyper-parameters of a segment of `shard`; None where its parameter was not touched in this step."""
        count = self.steps.get(shard, {}).get(segment.parameter)
        return None if count is None else self.groups[segment.group].at(count)
