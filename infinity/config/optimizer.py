"""The section `optimizer`: the update rule and its hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from infinity.config.section import Beta, Betas, Section, Share

OptimizerType = Literal[
    "Adam", "AdamW", "SGD", "Adagrad", "Lion", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"
]
NATIVE_TYPES = ("Adam", "AdamW")  # by infinity's own kernel, on every tier; the others by torch, with state in memory
_BETAS = (0.9, 0.999)
_ADAM: dict[str, object] = {"lr": 1e-3, "betas": _BETAS, "eps": 1e-8, "weight_decay": 0.0}
# The parameters of each type with their defaults: torch.optim's, and for Lion those of Chen et al. (2023).
PARAMS_OF_TYPE: dict[str, dict[str, object]] = {
    "Adam": {**_ADAM, "adam_w_mode": True},
    "AdamW": {**_ADAM, "weight_decay": 0.01, "adam_w_mode": True},
    "SGD": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "RMSprop": {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False},
    "Adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
    "Adamax": {**_ADAM, "lr": 2e-3},
    "NAdam": {**_ADAM, "lr": 2e-3, "momentum_decay": 4e-3, "decoupled_weight_decay": False},
    "RAdam": {**_ADAM, "decoupled_weight_decay": False},
    "ASGD": {"lr": 1e-2, "lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0},
    "Rprop": {"lr": 1e-2, "etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0)},
}
# The fp32 values that a type keeps for each element: the parameter that asks for each, None where nothing has to.
_VALUES: dict[str, tuple[str | None, ...]] = {
    "Adam": (None, None, "amsgrad"),
    "AdamW": (None, None, "amsgrad"),
    "SGD": ("momentum",),
    "Adagrad": (None,),
    "Lion": (None,),
    "RMSprop": (None, "momentum", "centered"),
    "Adadelta": (None, None),
    "Adamax": (None, None),
    "NAdam": (None, None),
    "RAdam": (None, None),
    "ASGD": (None,),
    "Rprop": (None, None),
}
_NAMES = {name.lower(): name for name in PARAMS_OF_TYPE}
# What DeepSpeed knows beside them.
_UNSUPPORTED = ("lamb", "muon", "onebitadam", "onebitlamb", "zerooneadam", "muadam", "muadamw", "musgd")

_Number = Annotated[float, Field(ge=0.0)]
_Pair = Annotated[tuple[_Number, _Number], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]


def _canonical_type(value: object) -> object:
    return _NAMES.get(value.lower(), value) if isinstance(value, str) else value


def _supported_type(value: object) -> object:
    if isinstance(value, str) and value.lower() in _UNSUPPORTED:
        raise ValueError(f"{value} is not supported; write one of {', '.join(PARAMS_OF_TYPE)}")
    return _canonical_type(value)


class OptimizerParams(Section):
    """`optimizer.params`; each type has its own, with the defaults of torch.optim."""

    lr: _Number = 1e-3
    betas: Betas | None = None
    eps: _Number | None = None
    weight_decay: _Number | None = None
    adam_w_mode: bool | None = None  # with type Adam, as in DeepSpeed: true is decoupled decay (AdamW), false is L2 (Adam)
    momentum: Beta | None = None
    dampening: Share | None = None
    nesterov: bool | None = None
    lr_decay: _Number | None = None
    initial_accumulator_value: _Number | None = None
    alpha: _Number | None = None
    centered: bool | None = None
    rho: Share | None = None
    momentum_decay: _Number | None = None
    decoupled_weight_decay: bool | None = None
    lambd: _Number | None = None
    t0: _Number | None = None
    etas: _Pair | None = None
    step_sizes: _Pair | None = None


class OptimizerSection(Section):
    """`optimizer`: the update rule and its hyper-parameters."""

    type: Annotated[
        OptimizerType,
        BeforeValidator(_supported_type),
        WithJsonSchema({"enum": [*PARAMS_OF_TYPE, *_NAMES]}),
    ] = "AdamW"
    params: OptimizerParams = OptimizerParams(**PARAMS_OF_TYPE["AdamW"])  # type: ignore[arg-type]

    @model_validator(mode="before")
    @classmethod
    def _fill_params(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        defaults = PARAMS_OF_TYPE.get(str(_canonical_type(values.get("type", "AdamW"))))
        params = values.get("params", {})
        if defaults is None or not isinstance(params, dict):
            return values
        return {**values, "params": defaults | {name: value for name, value in params.items() if value is not None}}

    @model_validator(mode="after")
    def _check_params(self) -> OptimizerSection:
        own = PARAMS_OF_TYPE[self.type]
        for name, value in self.params:
            if value is not None and name not in own:
                raise ValueError(f"type {self.type} has no parameter {name}; it has {', '.join(own)}")
        if self.type == "AdamW" and not self.params.adam_w_mode:
            raise ValueError("type AdamW contradicts adam_w_mode false; write type Adam for L2 regularisation")
        if self.params.nesterov and (not self.params.momentum or self.params.dampening):
            raise ValueError("nesterov needs a momentum and no dampening")
        return self

    @property
    def is_native(self) -> bool:
        """Whether infinity's own kernel makes the update, on every tier; otherwise torch does, with all state in memory."""
        return self.type in NATIVE_TYPES

    @property
    def decoupled(self) -> bool:
        """Whether weight decay acts on the weight directly (AdamW) instead of through the gradient (Adam)."""
        return bool(self.params.adam_w_mode)

    @property
    def num_values(self) -> int:
        """The fp32 values that are kept for each element beside the master."""
        return num_values(self.type, self.values())

    def values(self) -> dict[str, Any]:
        """Return the hyper-parameters of this type as its class takes them."""
        return {name: getattr(self.params, name) for name in PARAMS_OF_TYPE[self.type] if name != "adam_w_mode"}


def num_values(name: str, hyper_parameters: Mapping[str, object]) -> int:
    """Return how many fp32 values an optimizer of this type keeps for each element; 0 for a type that is not known."""
    return sum(parameter is None or bool(hyper_parameters.get(parameter)) for parameter in _VALUES.get(name, ()))
