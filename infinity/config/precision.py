"""The sections `bf16`, `fp16` and `data_types`: number formats."""

from __future__ import annotations

from pydantic import Field, model_validator

from infinity.config.section import Count, GradDtype, Section, WholeNumber


class Bf16Section(Section):
    """`bf16`: bf16 weights that are the high half of a split fp32 master. Off: everything is fp32."""

    enabled: bool = False


class Fp16Section(Section):
    """`fp16`: fp16 weights below a full fp32 master, and a loss scale that keeps small gradients above zero.

    The scale begins at 2^initial_scale_power; it is halved by a gradient that is not finite, once `hysteresis` of them were
    met, and doubled after `loss_scale_window` steps without one. `loss_scale` other than 0 is kept for the whole run.
    """

    enabled: bool = False
    loss_scale: float = Field(default=0.0, ge=0.0, le=2.0**126)  # 0: dynamic
    initial_scale_power: WholeNumber = Field(default=16, le=126)  # beyond it a reciprocal is no normal fp32 number
    loss_scale_window: Count = 1000  # steps
    hysteresis: Count = 2  # gradients that are not finite
    consecutive_hysteresis: bool = False  # whether a finite gradient restores the hysteresis
    min_loss_scale: float = Field(default=1.0, gt=0.0)

    @model_validator(mode="after")
    def _check_scale(self) -> Fp16Section:
        if self.loss_scale == 0 and self.min_loss_scale > 2.0**self.initial_scale_power:
            raise ValueError(
                f"min_loss_scale {self.min_loss_scale:g} is more than the scale that the run begins with, "
                f"2^initial_scale_power = 2^{self.initial_scale_power} = {2.0**self.initial_scale_power:g}"
            )
        return self


class DataTypesSection(Section):
    """`data_types`."""

    # The dtype in which a finished gradient waits for the update; sums over micro-batches are always fp32.
    grad_accum_dtype: GradDtype | None = None
