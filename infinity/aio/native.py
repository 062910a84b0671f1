"""The native module of csrc/aio, where there is one, and the engine that it opened."""

from __future__ import annotations

import os
import threading
from typing import Any

__all__ = ["NativeEngine", "ffi", "import_error", "lib"]

try:
    from infinity._aio import ffi, lib

    import_error = ""
except ImportError as error:
    ffi = lib = None
    import_error = str(error)


class NativeEngine:
    """Owns the C engine: closed once, then freed.

    Not left to a destructor of cffi: of the objects in a cycle the garbage collector may finalise the pointer first, and the
    C thread would go on in freed memory.
    """

    __slots__ = ("_closed", "_closing", "_owner_pid", "pointer")

    def __init__(self, pointer: Any, owner_pid: int) -> None:
        self.pointer = pointer  # aio_engine *
        self._owner_pid = owner_pid
        self._closed = False
        self._closing = threading.Lock()

    def has_thread(self) -> bool:
        """Return whether this process has the engine's thread: a forked child has not."""
        return os.getpid() == self._owner_pid

    def close(self) -> bool:
        """Finish what is in flight and end the thread; return False in a forked child, which has no thread to join."""
        if not self.has_thread():
            return False
        with self._closing:
            if not self._closed:
                lib.aio_close(self.pointer)
            self._closed = True
        return True

    def __del__(self) -> None:
        self.close()
        lib.aio_free(self.pointer)
