"""Merges layers into one flat table: key path -> value and source; checks every key that no section holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel

from infinity.config.deepspeed_keys import ALIASES, INNER_KEYS, KNOWN, MISTAKEN, SWITCHED_SECTIONS, KnownKey
from infinity.config.layers import Layer
from infinity.config.problems import given_by, unknown_key

AUTO = "auto"
DEFAULT_SOURCE = "default"


class SourcedValue(NamedTuple):
    """A value and where it comes from, in words; a value that it wins over is named there."""

    value: object
    source: str


@dataclass(frozen=True, slots=True)
class Schema:
    """The keys that sections hold, as dotted paths."""

    fields: frozenset[str]
    sections: frozenset[str]

    @property
    def known_paths(self) -> frozenset[str]:
        """Every key that may be written, for suggestions."""
        return self.fields | self.sections | frozenset(KNOWN) | frozenset(ALIASES) | frozenset(SWITCHED_SECTIONS)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What the layers say together; `problems` is empty when every key is known and said once a layer."""

    given: Mapping[str, SourcedValue]  # keys of sections that were given and are not "auto"
    chosen: Mapping[str, SourcedValue]  # what the program chose for keys that were not given, or are "auto"
    auto_sources: Mapping[str, str]  # keys whose strongest value is "auto", with its source
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    def nested(self) -> dict[str, object]:
        """Return the given and chosen values as nested sections."""
        tree: dict[str, object] = {}
        for path, (value, _) in (*self.chosen.items(), *self.given.items()):
            *parents, leaf = path.split(".")
            branch = tree
            for parent in parents:
                branch = branch.setdefault(parent, {})  # type: ignore[assignment]
            branch[leaf] = value
        return tree


def schema_of(model: type[BaseModel], prefix: str = "") -> Schema:
    """Return the key paths of a root section and of the sections below it."""
    fields: set[str] = set()
    sections: set[str] = set()
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            below = schema_of(field.annotation, f"{path}.")
            sections |= {path, *below.sections}
            fields |= below.fields
        else:
            fields.add(path)
    return Schema(frozenset(fields), frozenset(sections))


def resolve(layers: Sequence[Layer], schema: Schema, chosen: Layer | None = None) -> Resolved:
    """Merge `layers`, the weakest first; `chosen` fills in, by key path, what none gives or the last calls auto."""
    merged: dict[str, SourcedValue] = {}
    problems: list[str] = []
    notes: list[str] = []
    for layer in layers:
        seen: dict[str, object] = {}
        for path, value in _flatten(layer.values, "", schema):
            if path in seen:
                problems.append(
                    f"{path}: given twice, by two of its names, as {_as_json(seen[path])} and as {_as_json(value)}"
                    f"{given_by(layer.source)}."
                )
            seen[path] = value
            merged[path] = _override(merged.get(path), value, layer.source)
    given: dict[str, SourcedValue] = {}
    auto_sources: dict[str, str] = {}
    for path, sourced in merged.items():
        if path in schema.sections:
            if sourced.value is not None:
                problems.append(f"{path}: {sourced.value!r} is not a section of keys{given_by(sourced.source)}.")
        elif sourced.value == AUTO and path in schema.fields:
            auto_sources[path] = sourced.source
        elif path in schema.fields:
            given[path] = sourced
        elif known := _known_key(path):
            verdict, said = _judge(path, known, sourced)
            (notes if verdict else problems).append(said)
        else:
            problems.append(unknown_key(path, schema.known_paths, MISTAKEN) + given_by(sourced.source))
    return Resolved(given, _chosen(chosen, given, auto_sources), auto_sources, tuple(notes), tuple(problems))


def _chosen(
    layer: Layer | None, given: Mapping[str, SourcedValue], auto_sources: Mapping[str, str]
) -> dict[str, SourcedValue]:
    if layer is None:
        return {}
    said = {path: f" ({source} says auto)" for path, source in auto_sources.items()}
    return {
        path: SourcedValue(value, f"{layer.source}{said.get(path, '')}")
        for path, value in layer.values.items()
        if path not in given
    }


def _flatten(values: Mapping[str, object], parent: str, schema: Schema) -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        path, inner = _canonical(parent, str(key), value)
        if isinstance(inner, Mapping) and path in schema.sections:
            yield from _flatten(inner, path, schema)
        else:
            yield path, inner


def _canonical(parent: str, key: str, value: object) -> tuple[str, object]:
    """Follow a key, which may be a dotted path, under its proper names; below a section without fields it stays a tree."""
    path = parent
    parts = key.split(".")
    for position, part in enumerate(parts):
        path = f"{path}.{part}" if path else part
        path = ALIASES.get(path, path)
        known = _known_key(path)
        if known is not None and known.kind is dict:
            for inner in reversed(parts[position + 1 :]):
                value = {inner: value}
            break
    return path, value


def _override(weaker: SourcedValue | None, value: object, source: str) -> SourcedValue:
    if weaker is None or weaker.value == value or weaker.value == AUTO:
        return SourcedValue(value, source)
    return SourcedValue(value, f"{source}, which wins over {weaker.value!r} from {weaker.source}")


_SWITCHED = KnownKey(dict, "has no effect while it is switched off")


def _known_key(path: str) -> KnownKey | None:
    return _SWITCHED if path in SWITCHED_SECTIONS else KNOWN.get(path)


def _judge(path: str, known: KnownKey, sourced: SourcedValue) -> tuple[bool, str]:
    """Return whether a key without a field is acceptable, and the note or problem to say."""
    value, where = sourced.value, given_by(sourced.source)
    if value == AUTO:
        return True, f"{path}: {known.note if known.accepted is None else f'auto is {_as_json(known.accepted[0])}'}."
    if known is _SWITCHED:
        is_off = not value or (isinstance(value, Mapping) and value.get("enabled", True) in (False, AUTO))
        return (True, f"{path}: {known.note}.") if is_off else (False, f"{path}: is not supported in this release{where}.")
    kinds = known.kind if isinstance(known.kind, tuple) else (known.kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        return False, f"{path}: {value!r} should be of type {wanted}{where}."
    if isinstance(value, Mapping) and path in INNER_KEYS:
        inner = {f"{path}.{key}" for key in INNER_KEYS[path]}
        for key in value:
            if key not in INNER_KEYS[path]:
                return False, unknown_key(f"{path}.{key}", inner, MISTAKEN) + where
    if known.accepted is not None and value not in known.accepted:
        allowed = " or ".join(_as_json(accepted) for accepted in known.accepted)
        return False, f"{path}: {_as_json(value)} {known.note}; the only value is {allowed}{where}."
    return True, f"{path}: {known.note}."


def _as_json(value: object) -> str:
    return (
        {True: "true", False: "false", None: "null"}.get(value, repr(value))
        if isinstance(value, bool | None)
        else repr(value)
    )
