"""The header of a safetensors file: 8 bytes of length, JSON, then the tensors' bytes without holes. Pure; no I/O.

Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.byte_sizes import round_up
from infinity.checkpoint.specs import DTYPES, TensorSpec
from infinity.errors import CheckpointError

PREFIX_BYTES = 8
MAX_JSON_BYTES = 100_000_000  # the limit of the safetensors library
_DATA_ALIGN_BYTES = 64  # readers that map the file get aligned tensors
_METADATA = "__metadata__"
_NAMES = {code: name for name, (code, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one tensor's bytes lie in the file."""

    spec: TensorSpec
    offset: int  # first byte in the file

    def byte_range(self, first_element: int, num_elements: int) -> tuple[int, int]:
        """Return (file offset, bytes) of a run of elements. Raises CheckpointError outside the tensor."""
        if first_element < 0 or num_elements < 0 or first_element + num_elements > self.spec.numel:
            raise CheckpointError(
                f"Tensor {self.spec.name} has {self.spec.numel} elements; "
                f"elements {first_element} to {first_element + num_elements} were asked for."
            )
        return self.offset + first_element * self.spec.element_bytes, num_elements * self.spec.element_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """A file known from its specs alone."""

    encoded: bytes  # length prefix and JSON, as they stand in the file
    extents: Mapping[str, Extent]
    metadata: Mapping[str, str]
    file_bytes: int

    @property
    def crc32(self) -> int:
        return zlib.crc32(self.encoded)


def build_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> Header:
    """Lay out a file for `specs`. Raises CheckpointError for a name twice, an unknown dtype, or too many tensors.

    Wide elements come first, as in the safetensors library, so that every tensor is aligned to its element.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    ordered = sorted(specs, key=lambda spec: -spec.element_bytes)
    for spec in ordered:
        if spec.name in entries or spec.name == _METADATA:
            raise CheckpointError(f"Tensor {spec.name} appears twice in one file, or its name is reserved.")
        end = position + spec.num_bytes
        entries[spec.name] = {"dtype": DTYPES[spec.dtype][0], "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    data_offset = round_up(PREFIX_BYTES + len(text), _DATA_ALIGN_BYTES)
    json_bytes = data_offset - PREFIX_BYTES
    if json_bytes > MAX_JSON_BYTES:
        raise CheckpointError(f"A header of {json_bytes} bytes exceeds the {MAX_JSON_BYTES} of safetensors files.")
    extents = {spec.name: Extent(spec, data_offset + entries[spec.name]["data_offsets"][0]) for spec in ordered}
    encoded = json_bytes.to_bytes(PREFIX_BYTES, "little") + text.ljust(json_bytes)
    return Header(encoded, extents, dict(metadata), data_offset + position)


def json_length(prefix: bytes, *, where: str) -> int:
    """Return the length of the JSON that follows an 8-byte prefix. Raises CheckpointError for one that cannot be."""
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= MAX_JSON_BYTES:
        raise CheckpointError(f"{where} is not a safetensors file: it announces a header of {length} bytes.")
    return length


def parse_header(encoded: bytes, *, where: str) -> Header:
    """Read a whole header (prefix and JSON). Raises CheckpointError, naming `where`, for anything the format forbids."""
    try:
        entries = json.loads(encoded[PREFIX_BYTES:].decode(), object_pairs_hook=_unique)
        metadata = dict(entries.pop(_METADATA, {}))
        placed = [_tensor(name, entry) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} is not a safetensors file: its header cannot be read ({error}).") from error
    position = 0
    for spec, begin, end in sorted(placed, key=lambda item: item[1:]):
        if begin != position or end - begin != spec.num_bytes:
            raise CheckpointError(
                f"{where}: tensor {spec.name} of {spec.num_bytes} bytes lies at {begin} to {end}, expected it at {position}."
            )
        position = end
    extents = {spec.name: Extent(spec, len(encoded) + begin) for spec, begin, _ in placed}
    return Header(encoded, extents, metadata, len(encoded) + position)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name appears twice")
    return entries


def _tensor(name: str, entry: dict[str, Any]) -> tuple[TensorSpec, int, int]:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (*shape, begin, end)):
        raise ValueError(f"tensor {name} has shape {shape} at {begin} to {end}")
    if entry["dtype"] not in _NAMES:
        raise ValueError(f"tensor {name} has the unknown dtype {entry['dtype']}")
    return TensorSpec(name, _NAMES[entry["dtype"]], shape), begin, end
