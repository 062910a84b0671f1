"""Turns what is wrong with a configuration into sentences: the key's full path, the value, what would be right."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from infinity.errors import ConfigError


def unknown_key(path: str, known_paths: Collection[str], mistaken: Mapping[str, str]) -> str:
    """Say that `path` is no key, with the nearest key of its section, else of the whole configuration."""
    if path in mistaken:
        return f"{path}: unknown key; did you mean {mistaken[path]}?"
    parent, _, leaf = path.rpartition(".")
    siblings = {known.rpartition(".")[2] for known in known_paths if known.rpartition(".")[0] == parent}
    leaves = {known.rpartition(".")[2]: known for known in sorted(known_paths, reverse=True)}
    if leaf in leaves:
        return f"{path}: unknown key; did you mean {leaves[leaf]}?"
    if near := get_close_matches(leaf, siblings, n=1):
        return f"{path}: unknown key; did you mean {near[0]}?"
    if near := get_close_matches(leaf, leaves, n=1, cutoff=0.8):
        return f"{path}: unknown key; did you mean {leaves[near[0]]}?"
    if not siblings:
        return f"{path}: unknown key; {parent} has a value and no keys."
    return f"{path}: unknown key; {parent or 'the top level'} has {', '.join(sorted(siblings))}."


def validation_problems(error: ValidationError, sources: Mapping[str, str]) -> tuple[str, ...]:
    """Return one sentence for each error that pydantic found; `sources` says where each key was given."""
    return tuple(_sentence(details, sources) for details in error.errors(include_url=False))


def config_error(problems: Sequence[str]) -> ConfigError:
    """Return one error that lists every problem."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    return ConfigError("\n  - ".join([f"The configuration has {len(problems)} problems:", *problems]))


def given_by(source: str) -> str:
    """Return " (source)" for a problem's end."""
    return f" ({source})" if source else ""


def _sentence(details: ErrorDetails, sources: Mapping[str, str]) -> str:
    path = ".".join(str(part) for part in details["loc"])
    cause = details.get("ctx", {}).get("error")
    said = str(cause) if details["type"] == "value_error" else details["msg"].removeprefix("Input ")
    key = path
    while key not in sources and "." in key:  # an error inside a list is reported at the element
        key = key.rpartition(".")[0]
    where = given_by(sources.get(key, ""))
    if not said.startswith("should"):
        return f"{path}: {said}{where}." if path else f"{said}."
    return f"{path}: {details['input']!r} {said}{where}."
