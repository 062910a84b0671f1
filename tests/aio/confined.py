"""Run as a program: confines itself as the job in argv[1] says, uses the engines, and prints what came of it as JSON."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sandbox
from aio_cases import OPENERS, Memory, open_kind

from infinity.aio import uring
from infinity.aio.engine import Engine, MemoryRange
from infinity.aio.files import DirectFile, open_direct
from infinity.aio.select import open_engine, probe
from infinity.errors import PlatformError, StorageError
from infinity.handles import AllOf

PAGE = 4096
KINDS = [kind for kind in OPENERS if kind != "uring" or uring._lib is not None]


def moves_bytes(engine: Engine, file: DirectFile, num_bytes: int = 1 << 16, offset: int = 0) -> bool:
    """Return whether what is written comes back."""
    source, target = Memory(num_bytes), Memory(num_bytes)
    data = source.fill()
    engine.submit([source.write(file, offset)])[0].wait()
    engine.submit([target.read(file, offset)])[0].wait()
    return target.map[:] == data


def failure(engine: Engine, request: object) -> dict[str, Any]:
    """Return the error of a request."""
    try:
        engine.submit([request])[0].wait()  # type: ignore[list-item]
    except StorageError as error:
        return {"kind": type(error).__name__, "errno": error.errno, "text": str(error), "remedy": error.remedy}
    return {"kind": "", "errno": 0, "text": "", "remedy": ""}


def denied(number: str, directory: str, *system_calls: str) -> dict[str, Any]:
    """io_uring_setup and more system calls fail with errno `number`."""
    sandbox.deny(int(number), sandbox.IO_URING_SETUP, *map(int, system_calls))
    found = probe(Path(directory))
    engine, file = open_engine(found.engine), open_direct(Path(directory) / "file", create=True)
    answer: dict[str, Any] = {"probed": found.engine, "notes": found.notes, "same": moves_bytes(engine, file, 1 << 20)}
    engine.close()
    file.close()
    with_auto = open_engine("auto")
    answer["engine"] = with_auto.name
    with_auto.close()
    try:
        open_engine("uring")
    except PlatformError as error:
        answer["refusal"] = str(error)
    return answer


def little_locked_memory(limit: str, directory: str, *sizes: str) -> dict[str, Any]:
    """Register buffers of these sizes one by one, each with an engine of its own, and move bytes in them."""
    sandbox.limit_locked_memory(int(limit))
    answer: dict[str, Any] = {"probed": probe(Path(directory)).engine}
    for kind in KINDS:
        for size in sizes:
            engine, file, memory = open_kind(kind), open_direct(Path(directory) / kind, create=True), Memory(int(size))
            engine.register(files=[file], memory=[MemoryRange(memory.address, memory.num_bytes)])
            data = memory.fill()
            engine.submit([memory.write(file, 0)])[0].wait()
            memory.map[:] = bytes(memory.num_bytes)
            engine.submit([memory.read(file, 0)])[0].wait()
            facts = engine.facts
            answer[f"{kind} {size}"] = {
                "same": memory.map[:] == data, "buffers": facts.registered_buffers, "notes": facts.notes
            }  # fmt: skip
            engine.unregister(files=[file], memory=[MemoryRange(memory.address, memory.num_bytes)])
            engine.close()
            file.close()
    return answer


def files_of_six_pages(directory: str) -> dict[str, Any]:
    """The kernel cuts a write off at the sixth page (a real short write) and refuses the rest."""
    sandbox.limit_file_size(6 * PAGE)
    answer = {}
    for kind in KINDS:
        engine, file = open_kind(kind, queue_depth=1, block_bytes=4 * PAGE), open_direct(Path(directory) / kind, create=True)
        memory = Memory(10 * PAGE)
        data = memory.fill()
        answer[kind] = failure(engine, memory.write(file, 0))
        answer[kind]["kept"] = file.path.read_bytes() == data[: 6 * PAGE]
        answer[kind]["next"] = moves_bytes(engine, file, 6 * PAGE)
        engine.close()
        file.close()
    return answer


def full_disk(filesystem: str, directory: str) -> dict[str, Any]:
    """Write more than there is room for, then go on; then probe the full disk."""
    num_bytes = 8 << 20
    point, answer = sandbox.mount_small_disk(filesystem, Path(directory), num_bytes), {}
    for kind in KINDS:
        engine, file = open_kind(kind, queue_depth=4, block_bytes=1 << 18), open_direct(point / "file", create=True)
        memory = Memory(2 * num_bytes)
        memory.map[:PAGE] = b"x" * PAGE
        answer[kind] = failure(engine, memory.write(file, 0))
        answer[kind] |= {"path": str(file.path), "direct": file.direct, "next": moves_bytes(engine, file, PAGE)}
        filler = os.open(point / "filler", os.O_CREAT | os.O_WRONLY)
        try:
            while os.write(filler, bytes(PAGE)):
                pass
        except OSError:
            os.close(filler)
        try:
            probe(point, kind)
        except StorageError as error:
            answer[kind]["probe"] = {"kind": type(error).__name__, "text": str(error)}
        answer[kind]["left"] = sorted(path.name for path in point.iterdir() if path.name != "lost+found")
        engine.close()
        file.close()
        for name in ("file", "filler"):
            (point / name).unlink()
    return answer


def large_sectors(directory: str) -> dict[str, Any]:
    """A disk with sectors of 4,096 bytes: new files, files with content, and requests of 512 bytes."""
    point, answer = sandbox.mount_small_disk("ext4", Path(directory), 16 << 20, sector_bytes=PAGE), {}
    for kind in KINDS:
        engine, path = open_kind(kind, block_bytes=3 * PAGE), point / kind
        granules, same = [], []
        for _ in range(2):
            file = open_direct(path, create=True)
            granules.append(file.granule_bytes)
            same.append(moves_bytes(engine, file, 64 * PAGE))
            small = failure(engine, Memory(PAGE).write(file, 512, length=512))
            file.close()
        answer[kind] = {"granules": granules, "direct": file.direct, "same": same, "small": small}
        engine.close()
    return answer


def as_nobody(directory: str) -> dict[str, Any]:
    """An ordinary user without any right of root's, in a directory of its own."""
    os.chown(directory, 65534, 65534)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    return {kind: probe(Path(directory), kind).engine for kind in KINDS}


def few_descriptors(directory: str) -> dict[str, Any]:
    """Open engine after engine while there is room for the descriptors of one ring only, then none at all."""
    file = open_direct(Path(directory) / "file", create=True)
    sandbox.limit_descriptors(2)
    engines = [open_engine("auto") for _ in range(3)]
    answer = {"engines": [engine.name for engine in engines], "same": [moves_bytes(engine, file) for engine in engines]}
    for kind in OPENERS:
        try:
            open_engine(kind).close()
        except PlatformError as error:
            answer[kind] = str(error)
    for engine in engines:
        engine.close()
    return answer


def several_engines(directory: str, number: str, limit: str) -> dict[str, Any]:
    """Two engines of each kind at once, each with files of its own, in one of several processes."""
    sandbox.limit_locked_memory(int(limit))
    chooser = random.Random(int(number))
    engines = [open_kind(kind, queue_depth=16) for kind in KINDS for _ in range(2)]
    files = [open_direct(Path(directory) / f"{number}-{index}", create=True) for index in range(len(engines))]
    same = True
    for _ in range(4):
        sources, targets = [Memory(64 * PAGE) for _ in engines], [Memory(64 * PAGE) for _ in engines]
        expected = [source.fill() for source in sources]
        offset = chooser.randrange(64) * PAGE
        pairs = list(zip(engines, files, sources, targets, strict=True))
        AllOf([engine.submit([source.write(file, offset)])[0] for engine, file, source, _ in pairs]).wait()
        AllOf([engine.submit([target.read(file, offset)])[0] for engine, file, _, target in pairs]).wait()
        same = same and [target.map[:] for target in targets] == expected
    for engine, file in zip(engines, files, strict=True):
        engine.close()
        file.close()
    return {"same": same, "engines": [engine.name for engine in engines]}


JOBS: dict[str, Callable[..., dict[str, Any]]] = {
    job.__name__: job
    for job in (
        denied, little_locked_memory, files_of_six_pages, full_disk, large_sectors, as_nobody, few_descriptors,
        several_engines,
    )
}  # fmt: skip

print(json.dumps(JOBS[sys.argv[1]](*sys.argv[2:])))
