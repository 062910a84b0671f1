"""Threads for blocking calls: a limited number, each started when there is work for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Workers(Executor):
    """An executor for one event loop, with up to `limit` threads; the first is there from the start.

    Unlike the standard library's it never refuses a call that it has queued: where a thread cannot be had, the calls share
    those that there are.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # None: a thread may end
        self._lock = threading.Lock()
        # Under the lock.
        self._threads: list[threading.Thread] = []
        self._num_calls = 0  # that are not over
        self._ended = False

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """See Executor.submit. Raises RuntimeError after `shutdown`."""
        future: Future[_Result] = Future()

        def call() -> None:
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it, whatever it is
                self._call_is_over()
                future.set_exception(error)
            else:
                self._call_is_over()
                future.set_result(result)

        with self._lock:
            if self._ended:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._num_calls += 1
            if self._num_calls > len(self._threads) < self._limit:
                self._try_to_start()
            self._calls.put(call)
        return future

    def start(self) -> None:
        """Start the first thread. Raises RuntimeError where there is none to be had."""
        with self._lock:
            self._start_one()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads when every call is over; none is cancelled."""
        with self._lock:
            self._ended = True
            threads = tuple(self._threads)
        for _ in threads:
            self._calls.put(None)
        if wait:
            for thread in threads:
                thread.join()

    def _call_is_over(self) -> None:
        # Before the future has its result: the call that follows from it finds this thread free.
        with self._lock:
            self._num_calls -= 1

    def _try_to_start(self) -> None:
        try:
            self._start_one()
        except RuntimeError:
            self._limit = len(self._threads)

    def _start_one(self) -> None:
        thread = threading.Thread(target=self._serve, name="infinity-aio", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
