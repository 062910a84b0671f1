"""Layers of configuration, from weak to strong: file or Python value, then `--set`, then flags; each knows its source."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Layer:
    """Values from one place; `values` is nested, and a key may also be written as a dotted path."""

    source: str  # as the user would name it: "ds_config.json", "--lr"
    values: Mapping[str, object]


def file_layer(path: str | Path) -> Layer:
    """Read a JSON file. Raises ConfigError where it is missing, no JSON, no object, or names a key twice."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path}: cannot read the configuration: {error}.", remedy="Give the path of a JSON file."
        ) from None
    return _layer(text, str(path))


def base64_layer(text: str) -> Layer | None:
    """Read a JSON object that was written as base64; None where the text is no such thing, for example a path."""
    try:
        decoded = base64.b64decode(text, validate=True).decode("utf-8")
    except ValueError:
        return None
    return _layer(decoded, "the base64 configuration") if decoded.lstrip().startswith("{") else None


def _layer(text: str, source: str) -> Layer:
    try:
        values = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, source))
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}.",
            remedy="Comments and trailing commas are not JSON.",
        ) from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply to be a configuration.") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: holds {type(values).__name__}, not an object.", remedy='Write {"key": value, ...}.')
    return Layer(source, values)


def set_layer(assignment: str) -> Layer:
    """Parse one `key.path=value`; the value is JSON where it is JSON, else a string. Raises ConfigError without `=`."""
    key, separator, text = assignment.partition("=")
    if not separator or not key.strip():
        raise ConfigError(
            f"--set {assignment}: has no key and value.", remedy="Write for example --set optimizer.params.lr=3e-4."
        )
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, f"--set {key.strip()}"))
    except json.JSONDecodeError:
        value = text
    return Layer(f"--set {key.strip()}", {key.strip(): value})


def flag_layer(flag: str, key: str, value: object) -> Layer:
    """One command line flag that stands for one key."""
    return Layer(flag, {key: value})


def _unique(pairs: list[tuple[str, object]], where: object) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ConfigError(
                f"{where}: {key!r} is given twice, as {values[key]!r} and as {value!r}.", remedy="Keep one of them."
            )
        values[key] = value
    return values
