"""The sections `bf16`, `fp16` and `data_types`: number formats."""

from __future__ import annotations

from pydantic import field_validator

from infinity.config.section import GradDtype, Section


class Bf16Section(Section):
    """`bf16`: bf16 weights that are the high half of a split fp32 master. Off: everything is fp32."""

    enabled: bool = False


class Fp16Section(Section):
    """`fp16`: known, and refused when it is switched on."""

    enabled: bool = False

    @field_validator("enabled")
    @classmethod
    def _refuse(cls, enabled: bool) -> bool:
        if enabled:
            raise ValueError("fp16 comes in a later release, with loss scaling; set bf16.enabled instead")
        return enabled


class DataTypesSection(Section):
    """`data_types`."""

    # The dtype in which a finished gradient waits for the update; sums over micro-batches are always fp32.
    grad_accum_dtype: GradDtype | None = None
