"""Run as a program: use the directory argv[1] as a run would, and leave nothing in it.

Swap files are made, written, read back and registered with the engine that a run would take.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from infinity.aio.engine import EngineFacts, MemoryRange
from infinity.aio.files import open_direct
from infinity.aio.request import address_of
from infinity.aio.select import open_engine, probe
from infinity.doctor.answers import IO_BUFFER_BYTES, DirectoryAnswer, EngineAnswer
from infinity.doctor.trials import Refusal, give_answer, refusal_of
from infinity.errors import PlatformError, StorageError
from infinity.store.checks import check_directory


def examine(directory: Path) -> DirectoryAnswer:
    """Return what the directory is and what works in it. Raises StorageError where it cannot hold swap files."""
    with _made_for_now(directory) as is_new:
        facts = check_directory(directory)
        status, device = os.statvfs(facts.path), facts.path.stat().st_dev
        return DirectoryAnswer(
            path=str(facts.path),
            is_new=is_new,
            device=f"{os.major(device)}:{os.minor(device)}",
            is_memory=facts.is_memory,
            free_bytes=facts.free_bytes,
            free_inodes=status.f_favail if status.f_files else None,
            io=_try_io(facts.path),
        )


def _try_io(directory: Path) -> EngineAnswer:
    found = probe(directory)
    registered = _register(found.engine, directory)
    return EngineAnswer(
        engine=found.engine,
        direct=found.direct,
        uring_refusal=None if found.engine == "uring" else _uring_refusal(directory),
        registered_files=registered.registered_files,
        registered_buffers=registered.registered_buffers,
        buffer_bytes=IO_BUFFER_BYTES,
        registration_notes=registered.notes,
    )


def _uring_refusal(directory: Path) -> Refusal | None:
    try:
        probe(directory, "uring")
    except (PlatformError, StorageError) as error:
        return refusal_of(error)
    return None


def _register(kind: str, directory: Path) -> EngineFacts:
    """Give a file and memory to the engine to register, and return what it says of them."""
    with ExitStack() as resources:
        name = resources.enter_context(tempfile.NamedTemporaryFile(prefix=".infinity-doctor-", dir=directory)).name
        file = open_direct(name, create=False)
        resources.callback(file.close)
        memory = resources.enter_context(mmap.mmap(-1, IO_BUFFER_BYTES))
        engine = open_engine(kind)
        resources.callback(engine.close)
        engine.register(files=[file], memory=[MemoryRange(address_of(memory), IO_BUFFER_BYTES)])
        return engine.facts


@contextlib.contextmanager
def _made_for_now(directory: Path) -> Iterator[bool]:
    """Yield whether the directory is absent; if so, it is removed in the end, as it is made only to be tried."""
    is_new = not os.path.lexists(directory)
    try:
        yield is_new
    finally:
        if is_new:
            with contextlib.suppress(OSError):
                directory.rmdir()


if __name__ == "__main__":
    give_answer(lambda: examine(Path(sys.argv[1])))
