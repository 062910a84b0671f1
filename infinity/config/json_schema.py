"""The JSON schema of a configuration file, made from the sections and the tables of DeepSpeed's keys."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from infinity.config.config import Config
from infinity.config.deepspeed_keys import ALIASES, INNER_KEYS, KNOWN, SWITCHED_SECTIONS, KnownKey
from infinity.config.resolve import AUTO

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", type(None): "null"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_LEFT_OUT = ("title", "additionalProperties", "required", "$defs")


def build_json_schema() -> dict[str, Any]:
    """Return the schema: draft 2020-12, every key of every section, closed to others."""
    root = _section(Config, "")
    for path, known in KNOWN.items():
        _put(root, path, _known(path, known))
    for path in SWITCHED_SECTIONS:
        _put(root, path, {"type": ["object", "null"], "description": "Accepted while it is switched off."})
    for alias, path in ALIASES.items():
        _put(root, alias, {**_at(root, path), "description": f"Another name of {path}."})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Configuration of infinity", **root}


def _section(model: type[BaseModel], prefix: str) -> dict[str, Any]:
    described = model.model_json_schema()
    properties: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            properties[name] = _section(field.annotation, f"{path}.")
        else:
            properties[name] = _value(described["properties"][name])
    return {
        "type": ["object", "null"],
        "description": described.get("description", "").partition("\n")[0],
        "properties": properties,
        "additionalProperties": False,
    }


def _value(described: dict[str, Any]) -> dict[str, Any]:
    """Return a value's schema, which allows auto; a default of None is the program's choice and no default."""
    default = {"default": described["default"]} if described.get("default") is not None else {}
    own = {key: part for key, part in described.items() if key not in (*_LEFT_OUT, "default")}
    choices = own["anyOf"] if own.keys() == {"anyOf"} else [own]
    # pydantic keeps its own words for a bound behind a validator
    named = [{_BOUNDS.get(key, key): part for key, part in choice.items()} for choice in choices]
    return {"anyOf": [*named, {"const": AUTO}], **default}


def _known(path: str, known: KnownKey) -> dict[str, Any]:
    if known.accepted is not None:
        return {"enum": [*known.accepted, AUTO], "description": f"{known.note[0].upper()}{known.note[1:]}."}
    kinds = known.kind if isinstance(known.kind, tuple) else (known.kind,)
    schema: dict[str, Any] = {"type": [_TYPES[kind] for kind in kinds]}
    if path in INNER_KEYS:
        schema |= {"properties": {key: {} for key in INNER_KEYS[path]}, "additionalProperties": False}
    return {"anyOf": [schema, {"const": AUTO}], "description": f"{known.note[0].upper()}{known.note[1:]}."}


def _put(root: dict[str, Any], path: str, schema: dict[str, Any]) -> None:
    parent, _, name = path.rpartition(".")
    _at(root, parent)["properties"][name] = schema


def _at(root: dict[str, Any], path: str) -> dict[str, Any]:
    schema = root
    for part in path.split(".") if path else ():
        schema = schema["properties"][part]
    return schema
