"""Trained weights as safetensors files that transformers and the safetensors library load, streamed tensor by tensor.

One model.safetensors, or shards model-00001-of-00003.safetensors with model.safetensors.index.json. Tied names are stored
once; the metadata maps each alias to the stored name, as safetensors.torch.save_model does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from infinity.checkpoint.directory import alive
from infinity.checkpoint.failures import storage_errors
from infinity.checkpoint.manifest import sync_directory
from infinity.checkpoint.sources import HostData, host_bytes
from infinity.checkpoint.specs import TensorSpec
from infinity.checkpoint.stream import StreamWriter, open_stream_writer
from infinity.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OWN = re.compile(r"model(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?(?:\.partial-(\d+))?")

# What a loader takes in one file; transformers splits at the same size.
MAX_SHARD_BYTES = 50 * 10**9


def export_safetensors(
    directory: Path,
    specs: Sequence[TensorSpec],
    pieces: Iterable[tuple[str, int, HostData]],
    *,
    aliases: Mapping[str, str],
    metadata: Mapping[str, str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[Path, ...]:
    """Write the tensors into `directory` and return the files; an earlier export there is replaced.

    `pieces` are (tensor name, first element, elements) in any order, every element once. `aliases` maps a tied name to the
    stored one. Every file is whole and on disk before any gets its name; the one that loaders look for comes last, here and
    in what is returned. Memory is one piece. Raises CheckpointError for a missing element, an unknown tensor or an alias of
    one, SwapSpaceError, StorageError; after an error before the renames an earlier export is untouched.
    """
    shards = _split(specs, max_shard_bytes)
    stored = {spec.name: number for number, shard in enumerate(shards) for spec in shard}
    for alias, target in aliases.items():
        if target not in stored or alias in stored:
            raise CheckpointError(f"{alias} is tied to {target}: exactly the second must be among the exported tensors.")
    names = [_name(number, len(shards)) for number in range(len(shards))]
    with storage_errors("Creating", directory):
        directory.mkdir(parents=True, exist_ok=True)
    temporary = {name: directory / f"{name}.partial-{os.getpid()}" for name in (*names, INDEX)}
    try:
        with ExitStack() as opened:
            writers = []
            for number, (name, shard) in enumerate(zip(names, shards, strict=True)):
                own = {alias: target for alias, target in aliases.items() if stored[target] == number}
                writer = open_stream_writer(temporary[name], shard, {**metadata, "format": "pt", **own})
                writers.append(opened.enter_context(writer))
            _write_pieces(pieces, specs, {name: writers[number] for name, number in stored.items()})
            for writer in writers:
                writer.finish()
        if len(shards) > 1:
            total_bytes = sum(spec.num_bytes for spec in specs)
            weight_map = {name: names[number] for name, number in stored.items()}
            _write_index(temporary[INDEX], {"total_size": total_bytes, **metadata, **aliases}, weight_map)
            names.append(INDEX)
        with storage_errors("Renaming", directory):
            for name in names:
                os.rename(temporary[name], directory / name)
        sync_directory(directory)
        _remove_earlier(directory, set(names))
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return tuple(directory / name for name in names)


def _name(number: int, num_shards: int) -> str:
    return SINGLE if num_shards == 1 else f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"


def _split(specs: Sequence[TensorSpec], max_shard_bytes: int) -> list[list[TensorSpec]]:
    """Fill shards in order; a tensor larger than a shard gets one of its own."""
    shards: list[list[TensorSpec]] = [[]]
    used = 0
    for spec in specs:
        if shards[-1] and used + spec.num_bytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(spec)
        used += spec.num_bytes
    return shards


def _write_pieces(
    pieces: Iterable[tuple[str, int, HostData]], specs: Sequence[TensorSpec], writers: Mapping[str, StreamWriter]
) -> None:
    by_name = {spec.name: spec for spec in specs}
    for name, first_element, data in pieces:
        if name not in by_name:
            raise CheckpointError(f"{name} is not among the tensors that are exported.")
        writers[name].write(name, first_element, host_bytes(by_name[name], data))


def _write_index(path: Path, metadata: Mapping[str, str | int], weight_map: Mapping[str, str]) -> None:
    with storage_errors("Writing", path), path.open("w") as file:
        json.dump({"metadata": metadata, "weight_map": weight_map}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())


def _remove_earlier(directory: Path, current: set[str]) -> None:
    """Remove files of an earlier export that loaders would prefer or mix in, and what killed ones left."""
    with storage_errors("Cleaning", directory):
        for path in directory.iterdir():
            match = _OWN.fullmatch(path.name)
            if match and path.name not in current and not (match[1] and alive(int(match[1]))):
                path.unlink()
