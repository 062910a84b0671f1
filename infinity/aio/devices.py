"""One engine for each device: a request goes to the engine of the device that holds its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from infinity.aio.engine import Engine, EngineFacts, MemoryRange, RequestHandle
from infinity.aio.files import DirectFile
from infinity.aio.request import Request
from infinity.errors import InfinityError, PlatformError, StorageError


class DeviceEngine:
    """An engine over others of one kind. So a slow device fills its own queue and no other's.

    Any thread may submit. It owns the engines. A file on a device that has no engine of its own goes to the first one.
    """

    def __init__(self, engines: Mapping[int, Engine], notes: Sequence[str]) -> None:
        self._by_device = dict(engines)  # st_dev -> engine; an engine may serve several devices
        self._engines = tuple(dict.fromkeys(engines.values()))
        self._files: set[DirectFile] = set()  # that were given to `register`
        self._notes = tuple(notes)
        self.name = self._engines[0].name

    @property
    def facts(self) -> EngineFacts:
        """See Engine.facts: what holds for every engine that was given something, and the notes of all."""
        facts = {engine: engine.facts for engine in self._engines}
        with_files = {self._engine_of(file) for file in tuple(self._files)}
        return EngineFacts(
            registered_files=bool(with_files) and all(facts[engine].registered_files for engine in with_files),
            registered_buffers=all(one.registered_buffers for one in facts.values()),
            notes=tuple(dict.fromkeys((*self._notes, *(note for one in facts.values() for note in one.notes)))),
        )

    def register(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.register: files with the engine of their device, memory with every engine."""
        for engine in self._engines:
            its_files = self._files_of(engine, files)
            engine.register(files=its_files, memory=memory)
            self._files.update(its_files)

    def unregister(self, *, files: Sequence[DirectFile] = (), memory: Sequence[MemoryRange] = ()) -> None:
        """See Engine.unregister. Where an engine refuses, its files and those of the engines after it stay registered."""
        for engine in self._engines:
            its_files = self._files_of(engine, files)
            engine.unregister(files=its_files, memory=memory)
            self._files.difference_update(its_files)

    def submit(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """See Engine.submit."""
        targets = [self._engine_of(request.file) for request in requests]
        handles: dict[int, RequestHandle] = {}  # by position in `requests`
        for engine in dict.fromkeys(targets):
            positions = [position for position, target in enumerate(targets) if target is engine]
            try:
                submitted = engine.submit([requests[position] for position in positions])
            except InfinityError:
                # To the caller nothing was submitted, so nothing may be on its way into his buffers.
                for handle in handles.values():
                    with suppress(StorageError):
                        handle.wait()
                raise
            handles.update(zip(positions, submitted, strict=True))
        return [handles[position] for position in range(len(requests))]

    def close(self) -> None:
        """See Engine.close: every engine is closed, whatever becomes of the others."""
        with ExitStack() as closing:
            for engine in self._engines:
                closing.callback(engine.close)

    def _files_of(self, engine: Engine, files: Sequence[DirectFile]) -> list[DirectFile]:
        return [file for file in files if self._engine_of(file) is engine]

    def _engine_of(self, file: DirectFile) -> Engine:
        return self._by_device.get(file.device, self._engines[0])


def open_device_engines(directories: Sequence[Path], open_one: Callable[[], Engine]) -> Engine:
    """Open an engine for each device below `directories`; a plain one where there are not two.

    Where only the first engine can be had (locked memory, open files), it serves the others' devices too, and a note says
    so. Raises what `open_one` raises for the first.
    """
    first = open_one()
    engines, notes = {}, []
    with ExitStack() as on_error:
        on_error.callback(first.close)
        for directory in directories:
            device = os.stat(directory).st_dev
            if device in engines:
                continue
            engines[device] = first
            if len(engines) == 1:
                continue
            try:
                engines[device] = open_one()
            except PlatformError as error:
                notes.append(f"{directory} shares the I/O engine of {directories[0]}: a second one cannot be had. {error}")
            else:
                on_error.callback(engines[device].close)
        on_error.pop_all()
    return DeviceEngine(engines, notes) if len(engines) > 1 else first
