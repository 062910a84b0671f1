"""The section `optimizer`: the update rule and its hyper-parameters."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from infinity.config.section import Betas, Section

_NAMES = {"adam": "Adam", "adamw": "AdamW"}
_DEFAULT_WEIGHT_DECAY = {"Adam": 0.0, "AdamW": 0.01}  # torch.optim's


_LATER_OPTIMIZERS = (
    "adagrad",
    "lamb",
    "lion",
    "muon",
    "onebitadam",
    "onebitlamb",
    "zerooneadam",
    "muadam",
    "muadamw",
    "musgd",
    "sgd",
)


def _canonical_type(value: object) -> object:
    return _NAMES.get(value.lower(), value) if isinstance(value, str) else value


def _supported_type(value: object) -> object:
    if isinstance(value, str) and value.lower() in _LATER_OPTIMIZERS:
        raise ValueError(f"{value} is not supported in this release; write Adam or AdamW")
    return _canonical_type(value)


class AdamParams(Section):
    """`optimizer.params`; the defaults are those of torch.optim."""

    lr: float = Field(default=1e-3, ge=0.0)
    betas: Betas = (0.9, 0.999)
    eps: float = Field(default=1e-8, ge=0.0)
    weight_decay: float = Field(default=0.01, ge=0.0)  # 0 where the type is Adam
    adam_w_mode: bool = True  # with type Adam, as in DeepSpeed: true is decoupled weight decay (AdamW), false is L2 (Adam)


class OptimizerSection(Section):
    """`optimizer`: Adam or AdamW with its hyper-parameters."""

    type: Annotated[
        Literal["Adam", "AdamW"],
        BeforeValidator(_supported_type),
        WithJsonSchema({"enum": [*_NAMES.values(), *_NAMES]}),
    ] = "AdamW"
    params: AdamParams = AdamParams()

    @model_validator(mode="before")
    @classmethod
    def _fill_weight_decay(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        default = _DEFAULT_WEIGHT_DECAY.get(str(_canonical_type(values.get("type", "AdamW"))))
        params = values.get("params", {})
        if default is None or not isinstance(params, dict):
            return values
        return {**values, "params": {"weight_decay": default, **params}}

    @model_validator(mode="after")
    def _check_mode(self) -> OptimizerSection:
        if self.type == "AdamW" and not self.params.adam_w_mode:
            raise ValueError("type AdamW contradicts adam_w_mode false; write type Adam for L2 regularisation")
        return self

    @property
    def decoupled(self) -> bool:
        """Whether weight decay acts on the weight directly (AdamW) instead of through the gradient (Adam)."""
        return self.params.adam_w_mode
