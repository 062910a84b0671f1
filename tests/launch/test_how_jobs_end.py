"""What the ends of ranks, and signals, mean for a job: who is told what, who is the cause, which words and exit code."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from infinity.byte_sizes import GIB, MIB
from infinity.errors import CommError, ConfigError, IllegalTransition, OverBudget, StorageError
from infinity.launch.ends import End, Outcome, outcome_of
from infinity.launch.environment import Meeting, rank_environment, ranks_wanted
from infinity.launch.error_file import RecordedError, read_error, record_error
from infinity.launch.job import GRACE_SECONDS, Job, JobState
from infinity.launch.rank_process import start_rank
from infinity.memory.oom import OomSign, OomVerdict
from infinity.memory.processes import ProcessMemory

UNKNOWN, NOT_KILLED = OomVerdict(OomSign.UNKNOWN), OomVerdict(OomSign.NOT_KILLED)
LOST = RecordedError("Rank 1 is dead.", "Look at it.")


def ended(
    rank: int, exit_code: int, at: float = 0.0, error: RecordedError | None = None, oom: OomVerdict = UNKNOWN,
    by_launcher: bool = False, held: int = GIB,
) -> End:  # fmt: skip
    return End(rank, exit_code, at, by_launcher, error, ProcessMemory(held, 2 * held), oom)


class FakeRank:
    """A rank that ends when it is told to, with the code that is left to it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.end: End | None = None
        self.exit_code: int | None = None
        self.sent: list[signal.Signals] = []
        self.killed = False

    def look(self, now_seconds: float) -> End | None:
        if self.end is None and (self.killed or self.exit_code is not None):
            code = -signal.SIGKILL if self.exit_code is None else self.exit_code
            self.end = ended(self.rank, code, now_seconds, by_launcher=self.killed)
        return self.end

    def send(self, number: signal.Signals) -> None:
        self.sent.append(number)

    def kill(self) -> None:
        self.killed = self.killed or self.end is None


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def begun(num_ranks: int = 3) -> tuple[Job, list[FakeRank], Clock]:
    clock = Clock()
    job, ranks = Job(clock), [FakeRank(rank) for rank in range(num_ranks)]
    job.begin((lambda rank=rank: rank) for rank in ranks)
    return job, ranks, clock


def test_ranks_that_end_well_end_the_job_well() -> None:
    """A rank may end before the others; nobody is hurried, and the exit code is 0."""
    job, ranks, clock = begun()
    ranks[1].exit_code = 0
    clock.now += 3600
    assert not job.look()
    assert not ranks[0].killed
    ranks[0].exit_code = ranks[2].exit_code = 0
    assert job.look()
    assert job.look()
    assert (job.state, job.outcome()) == (JobState.ENDED, Outcome(0))


def test_the_others_have_their_time_when_a_rank_failed_and_no_more() -> None:
    """They may say why they cannot go on, and are killed at the deadline, never before (C130, C131)."""
    job, ranks, clock = begun()
    ranks[1].exit_code = StorageError.exit_code
    job.look()
    clock.now += GRACE_SECONDS - 0.1
    ranks[2].exit_code = CommError.exit_code
    assert not job.look()
    assert not ranks[0].killed
    clock.now += 0.2
    job.look()
    assert ranks[0].killed
    assert job.look()
    assert job.outcome().exit_code == StorageError.exit_code
    assert "Rank 0 did not end without it and had to be killed." in job.outcome().message


def test_a_signal_is_passed_on_once_and_has_no_deadline() -> None:
    """Ranks that stop one after another are waited for; a second signal gives the rest a deadline; a third kills (C133)."""
    job, ranks, clock = begun()
    job.note(signal.SIGTERM)
    assert [rank.sent for rank in ranks] == [[], [], []]
    job.look()
    job.look()
    assert [rank.sent for rank in ranks] == [[signal.SIGTERM]] * 3
    ranks[1].exit_code = 128 + signal.SIGTERM
    clock.now += 3600
    assert not job.look()
    assert not ranks[0].killed
    job.note(signal.SIGINT)
    job.look()
    assert ranks[0].sent == [signal.SIGTERM, signal.SIGINT]
    clock.now += GRACE_SECONDS - 0.1
    job.look()
    assert not ranks[0].killed
    job.note(signal.SIGINT)
    job.look()
    assert ranks[0].killed
    assert job.look()
    assert job.outcome() == Outcome(128 + signal.SIGTERM)


def test_a_rank_that_fails_while_it_stops_is_the_outcome() -> None:
    """A checkpoint that cannot be written counts more than the signal that asked for it."""
    job, ranks, clock = begun(2)
    job.note(signal.SIGTERM)
    job.look()
    ranks[0].exit_code = StorageError.exit_code
    job.look()
    clock.now += GRACE_SECONDS
    job.look()
    assert job.look()
    assert job.outcome().exit_code == StorageError.exit_code


def test_ranks_are_not_started_twice() -> None:
    """A job begins once."""
    job, _, _ = begun()
    with pytest.raises(IllegalTransition):
        job.begin([])


def test_the_cause_comes_before_what_it_caused() -> None:
    """A rank that only lost the others is not the cause, whenever it ended; of two causes the earlier one is."""
    lost = ended(0, CommError.exit_code, at=1.0, error=LOST)
    over = ended(1, OverBudget.exit_code, at=2.0, error=RecordedError("Too much.", "Take less."))
    disk = ended(2, StorageError.exit_code, at=3.0, error=RecordedError("No room.", "Make room."))
    outcome = outcome_of([lost, over, disk], None)
    assert (outcome.exit_code, outcome.remedy) == (OverBudget.exit_code, "Take less.")
    assert outcome.message.startswith("Rank 1 failed: Too much. Last known memory: rank 0 1.00 GiB (at most 2.00 GiB), ")
    alone = outcome_of([lost, ended(1, 0)], None)
    assert (alone.exit_code, alone.remedy) == (CommError.exit_code, "Look at it.")
    assert outcome_of([lost, ended(1, 3)], None).message.startswith("Rank 1 ended with exit code 3. ")


def test_a_stop_is_no_failure() -> None:
    """Ranks that a signal stopped end with its code, whoever sent it, and so does the job, without words."""
    stopped = ended(0, 128 + signal.SIGINT)
    assert outcome_of([stopped, stopped], None) == Outcome(128 + signal.SIGINT)
    assert outcome_of([ended(0, 141), ended(1, CommError.exit_code, error=LOST)], None) == Outcome(141)  # `| head`
    early = ended(1, -signal.SIGINT)  # before it could say how it wants to take the signal
    assert outcome_of([ended(0, CommError.exit_code, error=LOST), early], signal.SIGINT) == Outcome(128 + signal.SIGINT)


@pytest.mark.parametrize(
    ("oom", "held", "words", "remedy"),
    [
        (UNKNOWN, GIB, "probably for lack of host memory: the kernel's log (dmesg) says", "--cpu-memory 1303MiB would"),
        (OomVerdict(OomSign.KILLED, 2 * GIB), GIB, "the limit of its control group, 2.00 GiB, was", "--cpu-memory 1303MiB"),
        (OomVerdict(OomSign.KILLED, GIB), 4 * GIB, "the limit of its control group, 1.00 GiB, was", "--cpu-memory 1303MiB"),
        (OomVerdict(OomSign.KILLED), GIB, "the machine's memory was used up", "--cpu-memory 1303MiB"),
        (OomVerdict(OomSign.KILLED, 256 * MIB), 128 * MIB, "256.00 MiB", "too little for 2 ranks: raise the limit"),
    ],
)  # fmt: skip
def test_a_sigkill_is_read_as_lack_of_memory(oom: OomVerdict, held: int, words: str, remedy: str) -> None:
    """The words name the signal, the limit and each rank's memory, and the budget that would have stayed below (C40)."""
    outcome = outcome_of([ended(0, CommError.exit_code, held=held), ended(1, -signal.SIGKILL, held=held, oom=oom)], None)
    assert outcome.exit_code == CommError.exit_code
    assert outcome.message.startswith("Rank 1 was killed by SIGKILL, probably for lack of host memory: ")
    assert words in outcome.message
    assert "Last known memory: rank 0 " in outcome.message
    assert remedy in outcome.remedy
    assert outcome.lacks_memory


def test_a_sigkill_that_was_not_the_kernels_is_said_so() -> None:
    """Where the counters say that the kernel killed nothing, nobody is sent to look for memory."""
    outcome = outcome_of([ended(0, -signal.SIGKILL, oom=NOT_KILLED)], None)
    assert "somebody sent the signal" in outcome.message
    assert not outcome.lacks_memory
    assert "Native code crashed" in outcome_of([ended(0, -signal.SIGSEGV)], None).remedy


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "world_size", "wanted"),
    [(None, None, None, 1), (2, None, None, 2), (None, 4, None, 4), (2, 2, "1", 2), (2, None, "2", 1), (1, None, None, 1)],
)
def test_ranks_are_started_where_nobody_has_yet(
    num_ranks: int | None, num_gpus: int | None, world_size: str | None, wanted: int
) -> None:
    """The same command line starts the ranks in the launcher, and none in a rank."""
    environment = {} if world_size is None else {"WORLD_SIZE": world_size}
    assert ranks_wanted(num_ranks, num_gpus, environment) == wanted


@pytest.mark.parametrize(
    ("num_ranks", "num_gpus", "environment", "words"),
    [
        (0, None, {}, "--num-ranks: 0 is too small"),
        (2, 3, {}, "--num-gpus 3 contradicts --num-ranks 2"),
        (2, None, {"WORLD_SIZE": "4"}, "one of 4 ranks"),
    ],
)
def test_numbers_of_ranks_that_contradict_each_other(
    num_ranks: int | None, num_gpus: int | None, environment: dict[str, str], words: str
) -> None:
    """Each contradiction is named."""
    with pytest.raises(ConfigError, match=words):
        ranks_wanted(num_ranks, num_gpus, environment)


def test_what_the_user_has_set_for_threads_and_logs_stays(tmp_path: Path) -> None:
    """The launcher chooses only what is open, and overrides what an outer launcher said of ranks."""
    base = {"OMP_NUM_THREADS": "7", "TORCH_CPP_LOG_LEVEL": "INFO", "GLOO_SOCKET_IFNAME": "eth3", "RANK": "9", "HOME": "/x"}
    found = rank_environment(base, Meeting("127.0.0.1", 1234, "job", True), 1, 2, tmp_path / "error.json")
    assert {name: found[name] for name in base} == base | {"RANK": "1"}


def test_an_error_file_is_what_torch_reads(tmp_path: Path) -> None:
    """Message and remedy come back; torch's own reader finds message and time; what is no such file is None."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    path = tmp_path / "error.json"
    record_error("No room.", "Make room.", environment={"TORCHELASTIC_ERROR_FILE": str(path)})
    assert read_error(path) == RecordedError("No room.", "Make room.")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=5, error_file=str(path))
    assert "No room." in ChildFailedError("infinity", {0: failure}).format_msg()
    assert failure.timestamp == int(json.loads(path.read_text())["message"]["extraInfo"]["timestamp"])
    path.write_text('{"message": {"message"')
    assert read_error(path) is None
    path.write_text('{"message": "plain"}')
    assert read_error(path) is None
    record_error("Nobody asks.", "", environment={})
    record_error("No such place.", "", environment={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "no" / "such")})


def test_a_signal_to_a_rank_that_ends_just_then_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank ended after it was looked at: the signal goes nowhere, and the next look finds its exit code."""
    rank = start_rank([sys.executable, "-c", "raise SystemExit(7)"], 0, os.environ, tmp_path / "error.json")
    with monkeypatch.context() as patched:
        patched.setattr(rank, "_has_ended", lambda: False)
        for _ in range(200):
            rank.send(signal.SIGCONT)
            time.sleep(0.005)
    found = rank.look(0.0)
    assert found is not None
    assert found.exit_code == 7
