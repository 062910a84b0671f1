"""Files of both sorts and engines of every kind, closed behind every test."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aio_cases import OPENERS, open_kind

from infinity.aio.engine import Engine
from infinity.aio.files import DirectFile, open_direct


@pytest.fixture(params=list(OPENERS))
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "uring":
        pytest.importorskip("infinity._aio", reason="built without liburing")
    return request.param


@pytest.fixture
def engine(kind: str) -> Iterator[Engine]:
    opened = open_kind(kind)
    yield opened
    opened.close()


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[Callable[..., DirectFile]]:
    """Open files in the test's directory; a test that needs O_DIRECT is skipped where there is none."""
    files: list[DirectFile] = []

    def opener(*, direct: bool, name: str = "file") -> DirectFile:
        files.append(open_direct(tmp_path / name, create=True, direct=direct))
        if direct and not files[-1].direct:
            pytest.skip("this file system has no O_DIRECT")
        return files[-1]

    yield opener
    for file in files:
        file.close()


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def file(request: pytest.FixtureRequest, open_file: Callable[..., DirectFile]) -> DirectFile:
    return open_file(direct=request.param)


@pytest.fixture
def pipe_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every engine read pipes, as io_uring does: preadv takes no offset in them, and they cannot seek."""
    preadv = os.preadv

    def read(fd: int, buffers: list[object], offset: int) -> int:
        try:
            return preadv(fd, buffers, offset)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
            return os.readv(fd, buffers)

    class Seekless(io.FileIO):
        def seek(self, offset: int, whence: int = 0) -> int:
            try:
                return super().seek(offset, whence)
            except OSError as error:
                if error.errno != errno.ESPIPE:
                    raise
                return offset

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(
        "aiofiles.threadpool.sync_open", lambda file, mode, closefd, **_: Seekless(file, mode, closefd=closefd)
    )
