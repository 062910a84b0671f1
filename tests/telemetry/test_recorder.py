"""The recorder: counters that are booked to steps, and spans in bounded memory."""

import threading
from collections.abc import Iterator
from itertools import count

import pytest

from infinity.telemetry.recorder import Recorder


def ticking(step_ns: int = 10) -> "Iterator[int]":
    """A clock that advances by `step_ns` at every reading."""
    return count(100, step_ns)


def test_counters_are_booked_to_the_step_in_which_they_grew() -> None:
    """Each take returns the growth since the last one and names every counter; totals go on."""
    recorder = Recorder()
    recorder.count("nvme_read_bytes", 100)
    recorder.count("nvme_read_bytes", 20)
    recorder.count("unit_loads", 1)
    assert recorder.take_counters() == {"nvme_read_bytes": 120, "unit_loads": 1}
    recorder.count("nvme_read_bytes", 5)
    assert recorder.take_counters() == {"nvme_read_bytes": 5, "unit_loads": 0}
    assert recorder.take_counters() == {"nvme_read_bytes": 0, "unit_loads": 0}
    assert recorder.counters() == {"nvme_read_bytes": 125, "unit_loads": 1}


def test_no_count_is_lost_between_threads_and_steps() -> None:
    """Counts from many threads add up, and every one belongs to exactly one step."""
    recorder = Recorder()

    def work() -> None:
        for _ in range(2000):
            recorder.count("unit_loads", 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    taken = 0
    while any(thread.is_alive() for thread in threads):
        taken += recorder.take_counters().get("unit_loads", 0)
    taken += recorder.take_counters()["unit_loads"]
    assert taken == recorder.counters()["unit_loads"] == 8000


def test_a_span_has_its_ends_thread_and_attributes() -> None:
    """Nested spans end inside out; each knows its times, its thread and what was said about it."""
    clock = ticking()
    recorder = Recorder(clock_ns=lambda: next(clock))
    with recorder.span("step", number=3), recorder.span("read", shard=1, direct=True):
        pass
    read, step = recorder.spans()
    assert (read.name, read.start_ns, read.end_ns, read.attributes) == ("read", 110, 120, {"shard": 1, "direct": True})
    assert (step.name, step.start_ns, step.end_ns, step.attributes) == ("step", 100, 130, {"number": 3})
    assert read.thread_id == threading.get_ident()
    assert read.thread_name == threading.current_thread().name
    assert step.seconds == 30e-9


def test_a_span_ended_by_an_exception_is_kept_and_the_exception_goes_on() -> None:
    """Time spent before a failure is recorded; the failure is not swallowed."""
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.span("read"):
        raise KeyError("gone")
    assert [span.name for span in recorder.spans()] == ["read"]


def test_memory_is_bounded_and_dropped_spans_are_counted() -> None:
    """Of more spans than fit the latest stay, and the number of the others is known."""
    recorder = Recorder(max_spans=3)
    for number in range(5):
        recorder.add_span(f"span {number}", number, number + 1)
    assert [span.name for span in recorder.spans()] == ["span 2", "span 3", "span 4"]
    assert recorder.num_spans_dropped == 2


def test_spans_of_many_threads_are_all_kept() -> None:
    """Threads record beside each other and nothing is lost or mixed up."""
    recorder = Recorder()

    def work(number: int) -> None:
        for _ in range(500):
            with recorder.span(f"work {number}", number=number):
                pass

    threads = [threading.Thread(target=work, args=(number,), name=f"worker {number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = recorder.spans()
    assert len(spans) == 2000
    assert recorder.num_spans_dropped == 0
    assert all(span.thread_name == f"worker {span.attributes['number']}" for span in spans)
    assert all(span.start_ns <= span.end_ns for span in spans)
