"""One file opened several times over, so that pieces of it can move at the same time: an open file has only one position."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiofiles

from infinity.aio.files import DirectFile


class Reopened:
    """Up to `limit` open files of aiofiles on one DirectFile, each lent to one piece at a time; belongs to one event loop.

    They go through the page cache, whatever the DirectFile does. Where the path no longer leads to the file its own
    descriptor is used, for one piece at a time: then nobody else may use the descriptor's position.
    """

    def __init__(self, file: DirectFile, executor: Executor, limit: int) -> None:
        self._file = file
        self._executor = executor
        self._limit = limit
        self._opening = asyncio.Lock()
        self._idle: asyncio.LifoQueue[Any] = asyncio.LifoQueue()  # of aiofiles.threadpool.binary.AsyncFileIO
        self._num_open = 0

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Any]:
        """Lend an open file of aiofiles, as soon as there is one. Raises OSError where the file cannot be opened at all."""
        opened = await self._take()
        try:
            yield opened
        finally:
            self._idle.put_nowait(opened)

    async def close(self) -> None:
        """Close them all; none is lent."""
        while not self._idle.empty():
            opened = self._idle.get_nowait()
            # OSError: what writing back gives is the business of DirectFile.sync. RuntimeError: the interpreter ends and the
            # executor takes no call any more; then the file is closed where it is let go of.
            with suppress(OSError, RuntimeError):
                await opened.close()

    async def _take(self) -> Any:
        async with self._opening:
            if self._idle.empty() and self._num_open < self._limit and (opened := await self._open()) is not None:
                self._num_open += 1
                return opened
        return await self._idle.get()

    async def _open(self) -> Any:
        """Open the file once more; None where those that are open have to do (its path is gone, too many open files)."""
        with suppress(OSError):
            opened = await aiofiles.open(self._file.path, "r+b", buffering=0, executor=self._executor)
            if os.path.samestat(os.fstat(opened.fileno()), os.fstat(self._file.fd)):
                return opened
            await opened.close()
        self._limit = max(self._num_open, 1)
        if self._num_open:
            return None
        return await aiofiles.open(self._file.fd, "r+b", buffering=0, closefd=False, executor=self._executor)
