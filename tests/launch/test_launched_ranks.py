"""Ranks as real processes: what they find, how they end, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from infinity.errors import CommError, StorageError
from infinity.launch.ends import Outcome
from infinity.launch.run import run_ranks

ROOT = Path(__file__).resolve().parents[2]
TINY_RANK = Path(__file__).with_name("tiny_rank.py")
LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"}


def launch(what: str, directory: Path, num_ranks: int = 2) -> Outcome:
    """Run `what` of tiny_rank.py on several ranks."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS} | {"PYTHONPATH": str(ROOT)}
    return run_ranks([sys.executable, str(TINY_RANK), what, str(directory)], num_ranks, environment)


def is_alive(process_id: int) -> bool:
    """Return whether a process runs; one that is dead and not yet taken notice of does not."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_find_what_torchrun_would_tell_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each rank has torchrun's variables and its share of the cores; the lines of all but rank 0 bear its number."""
    shared_memory = set(os.listdir("/dev/shm"))
    assert launch("tell", tmp_path, num_ranks=3) == Outcome(0)
    for rank in range(3):
        found = dict(line.split("=", 1) for line in (tmp_path / f"rank{rank}").read_text().splitlines() if "=" in line)
        assert {found[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")} == {str(rank)}
        assert {found[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")} == {"3"}
        assert (found["GROUP_RANK"], found["GROUP_WORLD_SIZE"]) == ("0", "1")
        assert found["MASTER_ADDR"] == "127.0.0.1"
        assert int(found["MASTER_PORT"]) > 0
        assert found["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert found["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 3))
        assert found["TORCH_CPP_LOG_LEVEL"] == "ERROR"
    said = capfd.readouterr()
    assert said.out == "out of 0\n"
    assert sorted(said.err.splitlines()) == sorted(
        ["err of 0", *(f"[rank {rank}] {kind} of {rank}" for rank in (1, 2) for kind in ("out", "err"))]
    )
    assert set(os.listdir("/dev/shm")) == shared_memory


def test_a_rank_that_raises_ends_the_job_with_its_own_error(tmp_path: Path) -> None:
    """The first error's words, remedy and exit code are the job's, not those of the ranks that it took along (C130)."""
    outcome = launch("fail", tmp_path)
    assert outcome.exit_code == StorageError.exit_code
    assert outcome.message.startswith("Rank 1 failed: The disk of rank 1 is full.")
    assert outcome.remedy == "Make room."


def test_a_killed_rank_ends_the_job_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed: the launcher names rank, signal and memory, ends the one that hangs and what they started (C40, C131)."""
    monkeypatch.setattr("infinity.launch.job.GRACE_SECONDS", 0.5)
    outcome = launch("die", tmp_path)
    assert outcome.exit_code == CommError.exit_code
    assert outcome.message.startswith("Rank 1 was killed by SIGKILL")
    memory = outcome.message.partition("Last known memory: rank 0 ")[2]
    assert "MiB (at most " in memory
    assert float(memory.partition("rank 1 ")[2].split()[0]) > 64
    assert "Rank 0 did not end without it and had to be killed." in outcome.message
    started, _ = (tmp_path / "rank1").read_text().split()
    assert not is_alive(int(started))
    assert not is_alive(int((tmp_path / "rank0").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_every_rank_end_in_its_own_time(tmp_path: Path, number: signal.Signals) -> None:
    """Rank 1 stops at once, rank 0 finishes what it writes; the exit code is that of one rank."""

    def interrupt() -> None:
        while not all((tmp_path / f"rank{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    outcome = launch("stop", tmp_path)
    assert outcome == Outcome(128 + number)
    assert (tmp_path / "checkpoint").read_text() == "whole"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_and_a_third_signal_end_ranks_that_do_not_listen(tmp_path: Path) -> None:
    """Ranks that ignore the signals are killed by the third; the exit code is still the signal's."""

    def interrupt() -> None:
        while not all((tmp_path / f"rank{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)

    threading.Thread(target=interrupt, daemon=True).start()
    assert launch("hang", tmp_path).exit_code == 128 + signal.SIGINT
    assert not any(is_alive(int((tmp_path / f"rank{rank}").read_text())) for rank in range(2))


def test_a_command_that_cannot_be_started_leaves_no_rank(tmp_path: Path) -> None:
    """An executable that is not there is an error of the launcher's own."""
    with pytest.raises(FileNotFoundError):
        run_ranks([str(tmp_path / "absent")], 2, os.environ)
