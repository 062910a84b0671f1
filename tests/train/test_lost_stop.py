"""A signal whose exception is lost on its way, as where a module that is being imported catches whatever comes."""

from __future__ import annotations

import contextlib
import signal

import pytest

from infinity.errors import StorageError
from infinity.train.stopping import Stopped, stop_request


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_lost_stop_is_raised_again(number: signal.Signals) -> None:
    """Raised again when asked for, and at the latest at the end of the block; with the signal's own exit code."""
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught:
        _lose_a_stop(number)
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) == before


def test_a_stop_wins_over_what_fails_because_of_it() -> None:
    """Whatever closing raises after a stop (a write that was cancelled on its way), the run was stopped, and says so."""
    with pytest.raises(Stopped) as caught:
        _fail_after_a_stop()
    assert caught.value.exit_code == 143
    with pytest.raises(StorageError, match="lost"), stop_request():
        raise StorageError("a write was lost")  # without a stop it is what it is


def _fail_after_a_stop() -> None:
    with stop_request():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise StorageError("a write was lost")


def _lose_a_stop(number: signal.Signals) -> None:
    with stop_request() as request:
        request.raise_again()  # nothing came yet
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(number)
        with pytest.raises(Stopped):
            request.raise_again()
