"""The trace: what the viewers of the Chrome trace event format need."""

import json
import os
from pathlib import Path

import pytest

from infinity.errors import StorageError
from infinity.telemetry.recorder import Recorder, Span
from infinity.telemetry.trace import chrome_trace, write_chrome_trace

SPANS = (
    Span("compute", 5_500, 9_000, 11, "main", {"unit": "blocks.0"}),
    Span("read", 1_000, 4_250, 12, "ring", {"bytes": 4096}),
)


def test_spans_become_complete_events_in_order_of_their_start() -> None:
    """Times are microseconds without loss, attributes are arguments, and each thread is a named row."""
    trace = chrome_trace(SPANS, process_id=7, process_name="infinity")
    events = trace["traceEvents"]
    assert isinstance(events, list)
    names = {(event["name"], event["tid"]): event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {("process_name", 0): "infinity", ("thread_name", 11): "main", ("thread_name", 12): "ring"}
    assert [event for event in events if event["ph"] == "X"] == [
        {"ph": "X", "name": "read", "pid": 7, "tid": 12, "ts": 1.0, "dur": 3.25, "args": {"bytes": 4096}},
        {"ph": "X", "name": "compute", "pid": 7, "tid": 11, "ts": 5.5, "dur": 3.5, "args": {"unit": "blocks.0"}},
    ]


def test_the_file_is_json_of_this_process(tmp_path: Path) -> None:
    """A recorder's spans written to a file are read back as one JSON object."""
    recorder = Recorder()
    with recorder.span("step", number=1):
        pass
    path = tmp_path / "trace.json"
    write_chrome_trace(path, recorder.spans())
    events = json.loads(path.read_text())["traceEvents"]
    assert [(event["name"], event["pid"]) for event in events if event["ph"] == "X"] == [("step", os.getpid())]


def test_a_trace_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    """The error names the file."""
    with pytest.raises(StorageError, match=r"gone/trace\.json"):
        write_chrome_trace(tmp_path / "gone" / "trace.json", SPANS)
