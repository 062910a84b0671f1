"""Spans as a trace that chrome://tracing and ui.perfetto.dev show: one row a thread, times in microseconds."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from infinity.errors import StorageError
from infinity.telemetry.recorder import Span

_NANOSECONDS_PER_MICROSECOND = 1000


def chrome_trace(spans: Sequence[Span], *, process_id: int, process_name: str) -> dict[str, object]:
    """Return the trace as the JSON object of the Chrome trace event format ("X" complete events, "M" names)."""
    events: list[dict[str, object]] = [_named("process_name", process_name, process_id, 0)]
    events += [_named("thread_name", name, process_id, thread) for thread, name in _thread_names(spans).items()]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": process_id,
            "tid": span.thread_id,
            "ts": span.start_ns / _NANOSECONDS_PER_MICROSECOND,
            "dur": (span.end_ns - span.start_ns) / _NANOSECONDS_PER_MICROSECOND,
            "args": span.attributes,
        }
        for span in sorted(spans, key=lambda span: span.start_ns)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(path: Path, spans: Sequence[Span], *, process_name: str = "infinity") -> None:
    """Write the trace of this process's spans to `path`. Raises StorageError when it cannot be written."""
    text = json.dumps(chrome_trace(spans, process_id=os.getpid(), process_name=process_name))
    try:
        path.write_text(text)
    except OSError as error:
        raise StorageError(
            f"Cannot write the trace {path}: {error.strerror}.",
            remedy="Check the free space and the permissions of its directory.",
            errno=error.errno or 0,
        ) from error


def _thread_names(spans: Sequence[Span]) -> dict[int, str]:
    return {span.thread_id: span.thread_name for span in spans}


def _named(kind: str, name: str, process_id: int, thread_id: int) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": process_id, "tid": thread_id, "args": {"name": name}}
