"""`infinity train --num-ranks`: training that ends well, is stopped, or loses a rank in the middle of something."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infinity.errors import CommError, SwapCorruptionError

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 240
JOB = [
    "--model", "gpt-1m", "--seq-len", "64", "--micro-batch-size", "1", "--stage", "3", "--offload-optimizer", "nvme",
    "--offload-params", "nvme", "--cpu-memory", "700MiB",
]  # fmt: skip
STEADY = ("--lr-schedule", "constant", "--warmup-steps", "0")  # so that a longer run begins as a shorter one does
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "infinity")
LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
V1 = Path("/sys/fs/cgroup/memory")
pytestmark = pytest.mark.timeout(3 * LIMIT_SECONDS)  # one test trains up to three times


class Training:
    """A job of two ranks in a directory of its own."""

    def __init__(self, place: Path, process: subprocess.Popen[str]) -> None:
        self.output, self.nvme = place / "run", place / "nvme"
        self.process = process

    def num_steps(self) -> int:
        """Return how many steps the metrics have."""
        metrics = self.output / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the processes of the ranks."""
        children = psutil.Process(self.process.pid).children()
        told = [(child, child.environ().get("RANK")) for child in children]  # None: one that is being started
        return {int(rank): child for child, rank in told if rank is not None}

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait for something that training comes to; fail where it ends before."""
        until = time.monotonic() + LIMIT_SECONDS
        while not is_so():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until
            time.sleep(0.005)

    def end(self) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=LIMIT_SECONDS)
        return self.process.returncode, out, err


@contextmanager
def training(place: Path, *more: str, launcher: tuple[str, ...] = ("-m", "infinity")) -> Iterator[Training]:
    """Start a job and leave nothing of it behind."""
    given = () if launcher is TORCHRUN else ("--num-ranks", "2")
    command = [sys.executable, *launcher, "train", *given, "--nvme", str(place / "nvme"), "--output", str(place / "run")]
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [*command, *JOB, *more], env=environment, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started = Training(place, process)
    try:
        yield started
    finally:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.communicate()


def losses(output: Path) -> list[tuple[int, float]]:
    """Return the loss of every step, all bits of it."""
    return [(line["step"], line["loss"]) for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())]


def spoil(job: Training, path: Path) -> None:
    """Overwrite the beginning of a swap file again and again, past the page cache as training does, until the job ends."""
    descriptor = os.open(path, os.O_WRONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, min(1 << 20, os.fstat(descriptor).st_size)) as zeros:
            while job.process.poll() is None:
                os.pwrite(descriptor, zeros, 0)
    finally:
        os.close(descriptor)


def assert_nothing_left(job: Training, processes: list[psutil.Process], shared_memory: set[str]) -> None:
    """No process, no swap file, no shared memory."""
    assert [process for process in processes if process.is_running()] == []
    assert list(job.nvme.glob("*/*")) == []
    assert set(os.listdir("/dev/shm")) <= shared_memory


@pytest.mark.slow
def test_torchrun_and_our_launcher_train_the_same(tmp_path: Path) -> None:
    """Both start the same ranks: equal losses, bit for bit, one voice, and nothing left on NVMe."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "theirs").mkdir()
    with training(tmp_path / "ours", "--steps", "4") as ours:
        code, out, err = ours.end()
        assert (code, err) == (0, "")
        assert out.count("Summary") == 1
    with training(tmp_path / "theirs", "--steps", "4", launcher=TORCHRUN) as theirs:
        code, out, _ = theirs.end()
        assert code == 0
        assert out.count("Summary") == 1
    assert len(losses(ours.output)) == 4
    assert losses(ours.output) == losses(theirs.output)
    assert list(ours.nvme.glob("*/*")) == []


@pytest.mark.slow
def test_a_rank_that_raises_in_a_step_ends_training_with_its_error(tmp_path: Path) -> None:
    """Rank 1 finds its swap file spoilt: the exit code and the last words are those of its error, not of rank 0's (C130)."""
    shared_memory = set(os.listdir("/dev/shm"))
    with training(tmp_path, "--steps", "100000") as job:
        job.wait_until(lambda: job.num_steps() >= 2)
        ranks = job.ranks()
        spoil(job, job.nvme / "infinity-gpt-1m-rank1" / "swap.bin")
        code, _, err = job.end()
        assert code == SwapCorruptionError.exit_code
        assert err.rpartition("error: ")[2].startswith("Rank 1 failed: ")
        assert "infinity-gpt-1m-rank1" in err.rpartition("error: ")[2]
        assert_nothing_left(job, list(ranks.values()), shared_memory)


@pytest.mark.slow
def test_ranks_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """Without the launcher there is no store: the ranks notice, end by themselves, and remove their swap files (C131)."""
    with training(tmp_path, "--steps", "100000") as job:
        job.wait_until(lambda: job.num_steps() >= 2)
        ranks = list(job.ranks().values())
        job.process.kill()
        job.end()
        psutil.wait_procs(ranks, timeout=LIMIT_SECONDS)
        assert_nothing_left(job, ranks, set(os.listdir("/dev/shm")))


@pytest.mark.slow
def test_a_killed_rank_leaves_nothing_under_torchrun(tmp_path: Path) -> None:
    """The other rank says who is dead, in torchrun's report too, and removes what the dead one left on disk (C131)."""
    shared_memory = set(os.listdir("/dev/shm"))
    with training(tmp_path, "--steps", "100000", launcher=TORCHRUN) as job:
        job.wait_until(lambda: job.num_steps() >= 2)
        ranks = job.ranks()
        ranks[1].kill()
        code, _, err = job.end()
        assert code != 0
        assert "error: Rank 1 is dead: " in err
        assert "traceback : Rank 1 is dead: " in err
        assert_nothing_left(job, list(ranks.values()), shared_memory)


def while_it_saves(job: Training) -> bool:
    """Whether a checkpoint is being written."""
    return any((job.output / "checkpoints").glob("*.partial-*"))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["steps", "save"])
def test_a_rank_that_is_killed_ends_training(tmp_path: Path, moment: str) -> None:
    """SIGKILL in the middle of steps, and of a save: rank and signal are named, nothing is left (C40, C131)."""
    shared_memory = set(os.listdir("/dev/shm"))
    with training(tmp_path, "--steps", "100000", "--checkpoint-every", "3") as job:
        job.wait_until(lambda: job.num_steps() >= 2 and (moment == "steps" or while_it_saves(job)))
        ranks = job.ranks()
        ranks[1].kill()
        code, _, err = job.end()
        assert code == CommError.exit_code
        last = err.rpartition("error: ")[2]
        assert last.startswith("Rank 1 was killed by SIGKILL")
        assert re.search(r"Last known memory: rank 0 \d+\.\d+ \wiB .*, rank 1 \d+\.\d+ \wiB", last)
        assert_nothing_left(job, list(ranks.values()), shared_memory)


@pytest.mark.slow
def test_a_rank_without_memory_says_what_would_fit(tmp_path: Path) -> None:
    """Rank 1 in a control group that is too small: the kernel kills it, and the last words are about memory (C40)."""
    group = V1 / f"infinity-launch-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no control groups of version 1 that this user may make")
    try:
        (group / "memory.limit_in_bytes").write_text(str(80 << 20))
        with training(tmp_path, "--steps", "100000") as job:
            job.wait_until(lambda: 1 in job.ranks())
            (group / "cgroup.procs").write_text(str(job.ranks()[1].pid))
            code, _, err = job.end()
        assert code == CommError.exit_code
        last = err.rpartition("error: ")[2]
        assert last.startswith("Rank 1 was killed by SIGKILL, probably for lack of host memory: the kernel has killed")
        assert "the limit of its control group, 80.00 MiB, was reached" in last
        assert "raise the limit" in last
    finally:
        group.rmdir()


@pytest.mark.slow
def test_ctrl_c_writes_one_checkpoint_and_training_goes_on_from_it(tmp_path: Path) -> None:
    """SIGINT to the launcher: all ranks stop after one step; the resumed run is the uninterrupted one, bit for bit."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "halves").mkdir()
    with training(tmp_path / "whole", "--steps", "8", *STEADY) as whole:
        assert whole.end()[0] == 0
    with training(tmp_path / "halves", "--steps", "100000", *STEADY) as first:
        first.wait_until(lambda: first.num_steps() >= 2)
        first.process.send_signal(signal.SIGINT)
        code, _, err = first.end()
        assert (code, err) == (128 + signal.SIGINT, "")
    num_done = first.num_steps()
    assert [path.name for path in (first.output / "checkpoints").iterdir()] == [f"step-{num_done:08d}"]
    with training(tmp_path / "halves", "--steps", str(max(8, num_done)), *STEADY) as second:
        assert second.end()[0] == 0
    assert losses(second.output)[:8] == losses(whole.output)
