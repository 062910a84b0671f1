"""The JSON schema that is shipped says what the sections say, and accepts what they accept."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest
from test_config_deepspeed import GUIDES
from test_config_surface import FIELDS

from infinity.config.config import SCHEMA
from infinity.config.json_schema import build_json_schema

SHIPPED: dict[str, Any] = json.loads(files("infinity.config").joinpath("schema.json").read_text(encoding="utf-8"))
KINDS = {"object": dict, "string": str, "boolean": bool, "array": list | tuple, "null": type(None)}


def is_of(value: object, kind: str) -> bool:
    if kind == "integer":
        return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value.is_integer()))
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, KINDS[kind])


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """The part of JSON schema that the file uses."""
    if "anyOf" in schema:
        return any(accepts(choice, value) for choice in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        same = [one for one in schema.get("enum", [schema.get("const")]) if one == value]
        return any(isinstance(one, bool) == isinstance(value, bool) for one in same)
    kinds = schema.get("type", [])
    if kinds and not any(is_of(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", float("-inf")), schema.get("maximum", float("inf"))
        above, below = schema.get("exclusiveMinimum", float("-inf")), schema.get("exclusiveMaximum", float("inf"))
        return bool(low <= value <= high and above < value < below)
    if isinstance(value, dict) and "properties" in schema:
        return all(name in schema["properties"] and accepts(schema["properties"][name], one) for name, one in value.items())
    return True


def nested(path: str, value: object) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value  # type: ignore[return-value]


def test_the_shipped_schema_is_the_sections_own() -> None:
    """schema.json is what scripts/write_config_schema.py writes today."""
    assert json.loads(json.dumps(build_json_schema())) == SHIPPED


def test_every_key_that_may_be_written_is_in_the_schema() -> None:
    """Fields, known keys and other names all have their place; nothing else has."""

    def paths(schema: dict[str, Any], prefix: str = "") -> set[str]:
        return {
            path
            for name, inner in schema["properties"].items()
            for path in {f"{prefix}{name}"} | (paths(inner, f"{prefix}{name}.") if "properties" in inner else set())
        }

    assert paths(SHIPPED) - paths(SHIPPED["properties"]["bfloat16"], "bfloat16.") == SCHEMA.known_paths


@pytest.mark.parametrize("values", GUIDES.values(), ids=GUIDES)
def test_the_guides_fit_the_schema(values: dict[str, object]) -> None:
    """Configurations that the reader accepts are accepted by the schema."""
    assert accepts(SHIPPED, values)


@pytest.mark.parametrize("key", sorted(FIELDS))
def test_every_value_fits_the_schema_as_auto_does(key: str) -> None:
    """A legal value and auto fit each key; an object does not."""
    assert accepts(SHIPPED, nested(key, FIELDS[key]))
    assert accepts(SHIPPED, nested(key, "auto"))
    assert not accepts(SHIPPED, nested(key, {"x": 1}))


@pytest.mark.parametrize("values", [
    {"zero_optimization": {"stage": 4}}, {"seed": -1}, {"sead": 1}, {"bf16": {"enabled": "yes"}},
    {"optimizer": {"type": "Adam", "params": {"lr": -1}}}, {"zero_optimization": {"zero_quantized_weights": True}},
    {"tensorboard": {"output_pth": "x"}}, {"train_batch_size": 2.5},
])  # fmt: skip
def test_what_the_reader_refuses_does_not_fit(values: dict[str, object]) -> None:
    """Unknown keys, wrong types and values outside their range are errors of the schema, too."""
    assert not accepts(SHIPPED, values)
