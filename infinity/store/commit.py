"""A checkpoint in place: the swap files themselves, made durable and given a manifest.

    commit      resident state -> resident.bin, fsync; then committed.json into every run directory, the first one last
    adopt       a later run locks those directories and goes on in their swap files
    consume     the first write to a swap file after either: committed.json becomes consumed.json, resident.bin goes

A checkpoint in place needs almost no room and lasts exactly until training goes on: from the first write after it (or after
its adoption) until the next commit a crash leaves no checkpoint. Where that is too little, write a copy.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from infinity.errors import CheckpointIncomplete, CheckpointMismatch
from infinity.states import Tier
from infinity.store.directory import COMMITTED_NAME, CONSUMED_NAME, RESIDENT_NAME, SWAP_NAME
from infinity.store.durable import sync_directory, write_json_durably
from infinity.store.extents import Extent, ExtentTable, Shards
from infinity.store.shares import ShardShares
from infinity.store.stripes import Stripe

_FORMAT = "infinity-commit/2"
CHECKSUMS = "checksums"  # key of the description


@dataclass(frozen=True, slots=True)
class Commit:
    """What committed.json says."""

    commit_id: str
    run_paths: tuple[Path, ...]  # every run directory of the store; one of them holds resident.bin
    fingerprint: str  # of the layout and the extents
    shares: tuple[ShardShares, ...]  # the next run must use the same
    stripes: tuple[Stripe, ...]  # of each run directory: the extents follow from them, whatever the devices do by now
    file_bytes: tuple[int, ...]  # of each swap file
    resident_bytes: int
    checksums: Mapping[str, int]  # CRC32C of each extent by `checksum_key`, as far as they were known
    manifest: Mapping[str, object]  # the caller's own: counters, random state, ...


def fingerprint(shards: Shards, table: ExtentTable, grad_element_bytes: int) -> str:
    """Return a hash of all that gives the bytes of the swap files their meaning."""
    content = [
        (
            layout.name,
            [asdict(spec) for spec in layout.specs],
            [
                (section.dtype, section.trainable, section.unit_elements, section.shard_elements)
                for section in layout.sections
            ],
            [(tile.section, tile.offset, tile.num_elements) for tile in layout.tiles],
            _shares_to_json(shares),
        )
        for layout, shares in shards
    ]
    text = json.dumps([content, asdict(table), grad_element_bytes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def describe_extents(swapped: ExtentTable, resident: ExtentTable, shards: Shards) -> list[dict[str, object]]:
    """Return, per shard, where a checkpoint in place has its weights and tiles, as JSON-able values."""
    described: list[dict[str, object]] = []
    for (layout, _), on_disk, in_ram in zip(shards, swapped.shards, resident.shards, strict=True):
        tiles = [_on_disk(disk) or _in_ram(ram) for disk, ram in zip(on_disk.tiles, in_ram.tiles, strict=True)]
        weights = _on_disk(on_disk.weights) or _in_ram(in_ram.weights)
        described.append({"name": layout.name, "weights": weights, "tiles": tiles})
    return described


def checksum_key(file_name: str, extent: Extent) -> str:
    """Return the key of an extent's checksum in `Commit.checksums`."""
    return f"{file_name} {extent.file} {extent.offset}"


def write_commit(
    run_paths: Sequence[Path], *, description: Mapping[str, object], resident_bytes: int, manifest: Mapping[str, object]
) -> None:
    """Write committed.json into every run directory. It counts once the first one has it, which comes last."""
    content = {
        "format": _FORMAT,
        "commit_id": secrets.token_hex(16),
        "resident_bytes": resident_bytes,
        **description,
        "manifest": dict(manifest),
    }
    for path in reversed(run_paths):
        write_json_durably(path / COMMITTED_NAME, content)


def read_commit(path: Path) -> Commit:
    """Return the commit of a run directory, any of those that it spans.

    Raises CheckpointIncomplete when there is none, a directory or file of it is missing or has the wrong size, or the
    directories hold different commits, and CheckpointMismatch for a format that this version does not know.
    """
    commit = _read(path)
    for number, run_path in enumerate(commit.run_paths):
        if _read(run_path).commit_id != commit.commit_id:
            raise CheckpointIncomplete(
                f"{run_path} and {path} hold different checkpoints.", remedy="Resume from another one."
            )
        _require_size(run_path / SWAP_NAME, commit.file_bytes[number])
    if commit.resident_bytes:
        _require_size(find_resident(commit.run_paths) or commit.run_paths[0] / RESIDENT_NAME, commit.resident_bytes)
    return commit


def consume_commit(run_paths: Sequence[Path]) -> None:
    """Say that the swap files are no checkpoint any more; durable before this returns."""
    for path in run_paths:
        if (path / COMMITTED_NAME).exists():
            (path / COMMITTED_NAME).replace(path / CONSUMED_NAME)
            sync_directory(path)
    for path in run_paths:
        (path / RESIDENT_NAME).unlink(missing_ok=True)


def find_resident(run_paths: Sequence[Path]) -> Path | None:
    """Return the path of resident.bin, in whichever run directory it is; None where there is none."""
    return next((path / RESIDENT_NAME for path in run_paths if (path / RESIDENT_NAME).exists()), None)


def shares_to_json(shares: Sequence[ShardShares]) -> list[dict[str, object]]:
    """Return the shares as JSON-able values."""
    return [_shares_to_json(one) for one in shares]


def _shares_to_json(shares: ShardShares) -> dict[str, object]:
    return {
        "params": shares.params.value,
        "grads": shares.grads.value,
        "resident_tiles": sorted(shares.resident_tiles),
        "num_sums": shares.num_sums,
    }


def _on_disk(extent: Extent | None) -> dict[str, object] | None:
    if extent is None:
        return None
    return {"file": SWAP_NAME, "directory": extent.file, "offset": extent.offset, "length": extent.num_bytes}


def _in_ram(extent: Extent | None) -> dict[str, object] | None:
    return None if extent is None else {"file": RESIDENT_NAME, "offset": extent.offset, "length": extent.num_bytes}


def _read(path: Path) -> Commit:
    file = path / COMMITTED_NAME
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise CheckpointMismatch(
                f"{file}: format {content['format']!r}, not {_FORMAT!r}.", remedy="Resume with the version that wrote it."
            )
        return Commit(
            commit_id=content["commit_id"],
            run_paths=tuple(Path(run) for run in content["directories"]),
            fingerprint=content["fingerprint"],
            shares=tuple(
                ShardShares(Tier(one["params"]), Tier(one["grads"]), frozenset(one["resident_tiles"]), int(one["num_sums"]))
                for one in content["shares"]
            ),
            stripes=tuple(Stripe(float(one["weight"]), one["limit_bytes"]) for one in content["stripes"]),
            file_bytes=tuple(content["file_bytes"]),
            resident_bytes=content["resident_bytes"],
            checksums={str(name): int(value) for name, value in content.get(CHECKSUMS, {}).items()},
            manifest=content["manifest"],
        )
    except FileNotFoundError as error:
        raise CheckpointIncomplete(
            f"{path} holds no checkpoint: no {COMMITTED_NAME}.", remedy="Resume from another one."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointIncomplete(f"{file} cannot be read: {error}.", remedy="Resume from another one.") from error


def _require_size(path: Path, num_bytes: int) -> None:
    found = path.stat().st_size if path.exists() else None
    if found != num_bytes:
        got = "is missing" if found is None else f"has {found} bytes"
        raise CheckpointIncomplete(f"{path} {got}; {num_bytes} bytes are needed.", remedy="Resume from another checkpoint.")
