"""The files and the memory that one ring knows beforehand: what was given to it, what it took, and why not the rest."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Sequence

from infinity.aio.engine import EngineFacts, MemoryRange
from infinity.aio.files import DirectFile
from infinity.aio.native import NativeEngine, ffi, lib
from infinity.byte_sizes import KIB, format_bytes
from infinity.errors import IllegalTransition


class Registration:
    """Belongs to one engine, and to any thread. A file is known by its object, never by a number that may be another's."""

    def __init__(self, native: NativeEngine) -> None:
        self.tickets: dict[DirectFile, int] = {}  # the files that the ring took
        self._native = native
        self._lock = threading.Lock()
        self._files: dict[DirectFile, int] = {}  # what was given, and 0 or the -errno that it was refused with
        self._memory: dict[MemoryRange, int] = {}

    def facts(self) -> EngineFacts:
        """Return what holds now."""
        with self._lock:
            files, memory = dict(self._files), dict(self._memory)
        refused = sum(code != 0 for code in files.values())
        notes = []
        if refused:
            notes.append(_files_note(refused, next(code for code in files.values() if code)))
        if any(memory.values()):
            needed = sum(given.num_bytes for given in memory)
            notes.append(_memory_note(needed, next(code for code in memory.values() if code)))
        return EngineFacts(bool(files) and not refused, bool(memory) and not any(memory.values()), tuple(notes))

    def add(self, files: Sequence[DirectFile], memory: Sequence[MemoryRange]) -> None:
        """See Engine.register."""
        with self._lock:
            for file in files:
                if self._files.get(file) != 0:
                    self._files[file] = self._add_file(file)
            for given in memory:
                if self._memory.get(given) != 0:
                    self._memory[given] = _open(
                        lib.aio_register_memory(self._native.pointer, given.address, given.num_bytes)
                    )

    def remove(self, files: Sequence[DirectFile], memory: Sequence[MemoryRange]) -> None:
        """See Engine.unregister."""
        with self._lock:
            for file in files:
                self._remove_file(file)
                self._files.pop(file, None)
            for given in memory:
                if self._memory.pop(given, None) == 0:
                    lib.aio_unregister_memory(self._native.pointer, given.address, given.num_bytes)

    def _add_file(self, file: DirectFile) -> int:
        ticket = ffi.new("int32_t *")
        code = _open(lib.aio_register_file(self._native.pointer, file.fd, ticket))
        if not code:
            self.tickets[file] = ticket[0]
        return code

    def _remove_file(self, file: DirectFile) -> None:
        ticket = self.tickets.get(file)
        if ticket is None:
            return
        code = lib.aio_unregister_file(self._native.pointer, ticket)
        if code == -errno.EBUSY:
            raise IllegalTransition(
                f"io_uring engine: {file.path} is taken from it while requests on it are in flight.",
                remedy="Wait for every request on a file before it is unregistered.",
            )
        del self.tickets[file]


def _open(code: int) -> int:
    """Raise IllegalTransition where the engine is closed; return the code otherwise."""
    if code == -errno.ESHUTDOWN:
        raise IllegalTransition("io_uring engine: it is CLOSED and registers nothing.")
    return code


def _files_note(num_files: int, code: int) -> str:
    remedy = "Raise the limit of open files (`ulimit -n`)." if code in (-errno.EMFILE, -errno.ENFILE) else ""
    return (
        f"{num_files} file(s) could not be registered with io_uring ({os.strerror(-code)}), which costs CPU time and "
        f"nothing else. {remedy}"
    ).rstrip()


def _memory_note(needed_bytes: int, code: int) -> str:
    """Return the sentence about memory that the ring refused; all that it was given would have to be locked."""
    message = (
        f"I/O buffers could not be registered with io_uring ({os.strerror(-code)}), which costs CPU time and nothing else"
    )
    if code in (-errno.ENOMEM, -errno.EPERM, -errno.EAGAIN):
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        current = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
        return (
            f"{message}: {format_bytes(needed_bytes)} of locked memory are needed, the limit is {current}. Raise it with "
            f"`ulimit -l {-(-needed_bytes // KIB)}` (in a container `--ulimit memlock={needed_bytes}`)."
        )
    if code in (-errno.EINVAL, -errno.EOPNOTSUPP, -errno.ENOSYS):
        return f"{message}: Linux 5.19 or newer registers them."
    return f"{message}."
