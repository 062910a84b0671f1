"""The peak that is asked for rarely: it is the greatest answer, and asking takes a small share of the time."""

from __future__ import annotations

from infinity.train.shared_memory import SharedMemoryPeak


def test_a_slow_answer_is_asked_for_rarely() -> None:
    """With a look every second and answers that take a fifth of one, a look in eleven measures; the greatest stays."""
    now, answers = 0.0, iter([5, 9, 7, 0])
    asked_at: list[float] = []

    def measure() -> int:
        nonlocal now
        asked_at.append(round(now, 3))
        now += 0.2
        return next(answers)

    peak = SharedMemoryPeak(measure, lambda: now)
    for second in range(30):
        now = max(now, float(second))
        peak.look()
    assert asked_at == [0.0, 11.0, 22.0]
    assert peak.num_bytes == 9
