"""The base of every section of the configuration, and the value types that sections share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from infinity.byte_sizes import parse_bytes
from infinity.errors import ConfigError


class Section(BaseModel):
    """One section: frozen, strict about types, closed to unknown keys; NaN and Inf are not values."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _paths(value: object) -> object:
    entries = [value] if isinstance(value, str | Path) else value
    if not isinstance(entries, list | tuple) or not all(isinstance(entry, str | Path) and str(entry) for entry in entries):
        raise ValueError("should be a directory or a list of directories")
    return tuple(Path(entry).expanduser() for entry in entries)


def _words(value: object) -> object:
    entries = [value] if isinstance(value, str) else value
    return tuple(entries) if isinstance(entries, list) else entries


def _pair(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _size(value: object) -> object:
    problem = ValueError("should be a size such as 2GiB, 512MiB or a number of bytes")
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise problem
    try:
        return parse_bytes(value, name="size")
    except ConfigError:
        raise problem from None


# JSON writes large counts as 5e8; a float that is a whole number is taken as one.
Count = Annotated[int, BeforeValidator(_integral), Field(ge=1)]
WholeNumber = Annotated[int, BeforeValidator(_integral), Field(ge=0)]
Seed = Annotated[int, BeforeValidator(_integral), Field(ge=0, le=(1 << 63) - 1)]  # what every generator takes
_TEXTS = WithJsonSchema({"type": ["string", "array"], "items": {"type": "string"}})
Size = Annotated[  # bytes; "2GiB" in the file
    int, BeforeValidator(_size), WithJsonSchema({"type": ["integer", "string"]})
]
Directories = Annotated[tuple[Path, ...], BeforeValidator(_paths), _TEXTS]  # one path or a list of them in the file
Words = Annotated[tuple[str, ...], BeforeValidator(_words), _TEXTS]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Betas = Annotated[tuple[Beta, Beta], BeforeValidator(_pair)]
Rate = Annotated[float, Field(ge=0.0)]
Rates = Rate | Annotated[tuple[Rate, ...], Field(min_length=1), BeforeValidator(_pair)]  # one for all groups, or a list
GradDtype = Literal["fp32", "bf16", "fp16"]
