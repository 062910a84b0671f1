"""`infinity bench nvme` as a user runs it: results, refusals, and what is left behind however it ends."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_fakes import files_below
from click.testing import Result
from typer.testing import CliRunner

from infinity.aio.engine import Engine
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.request import Op, Request
from infinity.aio.select import open_engine
from infinity.bench import nvme_bed, nvme_places, nvme_tune
from infinity.cli.bench_display import PlainObserver
from infinity.cli.main import app
from infinity.config import file_layer
from infinity.errors import StorageError
from infinity.store.directory import RunDirectory, RunState, list_runs
from infinity.train.options import resolve_config

ROOT = Path(__file__).parents[2]
ROW_KEYS = {
    "op", "engine", "block_bytes", "queue_depth", "bytes_per_second", "bytes_per_second_min", "bytes_per_second_max", "iops",
    "latency_p50_us", "latency_p99_us", "latency_max_us", "cpu_seconds_per_gb", "registered_buffers", "registered_files",
}  # fmt: skip
QUICK = ["--size", "64MiB", "--block-size", "1MiB", "--queue-depth", "8", "--seconds", "0.1", "--long-run", "0"]


def bench(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", "nvme", *map(str, arguments)])


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    path = Path(f"/dev/shm/infinity-test-{os.getpid()}")
    if not path.parent.is_dir():
        pytest.skip("this machine has no /dev/shm")
    path.mkdir()
    try:
        yield path
        assert files_below(path) == []
    finally:
        shutil.rmtree(path)  # also where a test that failed has left something in memory


def test_results_have_the_promised_keys_and_nothing_is_left(disk: Path, tmp_path: Path) -> None:
    """Read, write and mixed at one size: a row each with exactly the keys promised, sane values, an empty directory."""
    out = tmp_path / "out.json"
    answer = bench("--nvme", disk, *QUICK[:-1], "0.2", "--engine", "threads", "--json", out)
    assert answer.exit_code == 0, answer.output
    found: dict[str, Any] = json.loads(out.read_text())
    assert [row["op"] for row in found["results"]] == ["read", "write", "mixed"]
    for row, detail in zip(found["results"], found["details"], strict=True):
        assert row.keys() == ROW_KEYS
        assert (row["engine"], row["block_bytes"], row["queue_depth"]) == ("threads", 1 << 20, 8)
        assert 0 < row["bytes_per_second_min"] <= row["bytes_per_second"] <= row["bytes_per_second_max"]
        assert row["iops"] == pytest.approx(row["bytes_per_second"] / (1 << 20))
        assert 0 < row["latency_p50_us"] <= row["latency_p99_us"] <= row["latency_max_us"]
        assert row["cpu_seconds_per_gb"] > 0
        assert row["registered_buffers"] is row["registered_files"] is False
        assert (detail["fsync_seconds"] is None) == (row["op"] == "read")
        assert len(detail["repetitions_bytes_per_second"]) == 5
        assert sum(detail["latency_histogram_us"].values()) >= 8
    assert found["against"] == []
    assert found["provenance"].keys() == {"command", "date", "versions", "hardware"}
    assert found["written_bytes"] > 64 << 20
    assert sum(found["long_run"]["rates"]) > 0
    assert "GB/s" in answer.stdout
    assert "write cache" in answer.stdout
    assert files_below(disk) == []


def test_the_ring_says_what_it_registered(disk: Path, tmp_path: Path) -> None:
    """With io_uring, what was registered of buffers and files is in every row."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    out = tmp_path / "out.json"
    answer = bench("--nvme", disk, *QUICK, "--op", "read", "--block-size", "4KiB", "--engine", "uring", "--json", out)
    assert answer.exit_code == 0, answer.output
    rows = json.loads(out.read_text())["results"]
    assert [row["block_bytes"] for row in rows] == [1 << 20, 4096]
    assert all(isinstance(row[key], bool) for row in rows for key in ("registered_buffers", "registered_files"))


@pytest.fixture
def fio_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program named fio that reports 1 GB/s, whatever it is asked."""
    moved = {"io_bytes": 10**9, "bw_bytes": 10**9, "clat_ns": {"max": 7000}}
    report = {"jobs": [{"error": 0, "mixed": moved, "usr_cpu": 1.0, "sys_cpu": 1.0, "job_runtime": 1000}]}
    stand_in = tmp_path / "bin" / "fio"
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!/bin/sh\ncat <<'E'\n{json.dumps(report)}\nE\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")


@pytest.mark.usefixtures("fio_stand_in")
@pytest.mark.parametrize("num_directories", [1, 2])
def test_fio_stands_beside_it_in_the_same_form(disk: Path, tmp_path: Path, num_directories: int) -> None:
    """Rows of fio have the same keys and the engine "fio:<engine>"; a note names the one directory that it ran in."""
    out = tmp_path / "out.json"
    others = ["--nvme", tmp_path / "other"][: 2 * (num_directories - 1)]
    asked = [*QUICK, "--op", "read", "--engine", "threads", "--against", "fio", "--json", out]
    answer = bench("--nvme", disk, *others, *asked)
    assert answer.exit_code == 0, answer.output
    found = json.loads(out.read_text())
    (row,) = found["against"]
    assert row.keys() == ROW_KEYS
    assert (row["engine"], row["bytes_per_second"], row["latency_max_us"]) == ("fio:libaio", 1e9, 7.0)
    assert "fio:libaio" in answer.stdout
    assert sum(f"fio ran in {disk} alone" in note for note in found["notes"]) == num_directories - 1


def test_two_directories_are_measured_each_and_together(disk: Path, tmp_path: Path) -> None:
    """There is a row for each directory alone and one for both, and nothing is left in either."""
    other, out = tmp_path / "other", tmp_path / "out.json"
    answer = bench("--nvme", disk, "--nvme", other, *QUICK, "--op", "write", "--engine", "threads", "--json", out)
    assert answer.exit_code == 0, answer.output
    found = json.loads(out.read_text())
    assert list(found["alone"]) == [str(disk), str(other)]
    assert [len(alone["results"]) for alone in found["alone"].values()] == [1, 1]
    assert len(found["results"]) == 1
    assert f"{other} alone" in answer.stdout
    assert files_below(disk) == []
    assert not other.exists()  # it was made for this


def test_a_tmpfs_is_said_to_be_memory(memory_directory: Path) -> None:
    """Results of a tmpfs are those of memory, and the output says so (C145)."""
    answer = bench("--nvme", memory_directory, *QUICK, "--op", "read")
    assert answer.exit_code == 0, answer.output
    assert "is memory (tmpfs), not a disk" in answer.stdout


def test_refused_direct_io_is_said(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system refuses O_DIRECT the measurement goes through the page cache, and the output says so (C145)."""
    system_open = os.open

    def refuse(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return system_open(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    answer = bench("--nvme", disk, *QUICK, "--op", "read", "--engine", "threads")
    assert answer.exit_code == 0, answer.output
    assert "refuses O_DIRECT" in answer.stdout
    assert "no O_DIRECT" in answer.stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "said"),
    [
        (["--nvme", "/dev/null"], 5, "a character device, not a directory"),
        (["--nvme", str(ROOT / "README.md")], 5, "a file, not a directory"),
        (["--nvme", "/nowhere/at/all"], 5, "does not exist"),
        (["--nvme", "DISK", "--nvme", "DISK/../disk"], 2, "given twice"),
        (["--nvme", "DISK", "--size", "900TiB"], 5, "are needed"),
        (["--nvme", "DISK", "--size", "1MiB"], 2, "--size"),
        (["--nvme", "DISK", "--op", "erase"], 2, "--op: 'erase'"),
        (["--nvme", "DISK", "--engine", "magic"], 2, "--engine: 'magic'"),
        (["--nvme", "DISK", "--against", "dd"], 2, "--against: 'dd'"),
        (["--nvme", "DISK", "--block-size", "1000"], 2, "--block-size"),
        (["--nvme", "DISK", "--json", "/dev/null"], 2, "--json: /dev/null exists and is not a file"),
        (["--nvme", "DISK", "--json", "/nowhere/out.json"], 2, "there is no directory /nowhere"),
        (["--nvme", "DISK", "--json", ""], 2, "'' is not a path"),
        (["--nvme", "DISK", "--plot", ""], 2, "'' is not a path"),
        (["--nvme", "DISK", "--tune", "--queue-depth", "8"], 2, "--tune contradicts --queue-depth"),
        (["--nvme", "DISK", "--tune", "--op", "read"], 2, "--tune contradicts --op"),
    ],
)
def test_refusals_come_first_and_write_nothing(disk: Path, arguments: list[str], exit_code: int, said: str) -> None:
    """A wrong option, place or size ends in one sentence and its exit code, before anything of size is written (C31)."""
    answer = bench(*[argument.replace("DISK", str(disk)) for argument in arguments])
    assert answer.exit_code == exit_code, answer.output
    assert said in answer.output
    assert files_below(disk) == []


def test_refusals_load_no_torch(disk: Path) -> None:
    """What can be known at once is known before torch is loaded, which takes seconds (C31)."""
    code = (
        "import sys; from typer.testing import CliRunner; from infinity.cli.main import app\n"
        f"answer = CliRunner().invoke(app, ['bench', 'nvme', '--nvme', {str(disk)!r}, '--size', '900TiB'])\n"
        "assert answer.exit_code == 5, answer.output\nassert 'torch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_a_failing_disk_gives_no_results(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails after rows were measured: exit code 5, the reason, no table, no JSON, no files (C29, C30)."""
    num_writes = 0

    def applies(request: Request) -> bool:
        nonlocal num_writes
        num_writes += request.op is Op.WRITE
        return num_writes > 20

    def faulty(kind: str, *, queue_depth: int, block_bytes: int) -> Engine:
        inner = open_engine(kind, queue_depth=queue_depth, block_bytes=block_bytes)
        return FaultyEngine(inner, [Fault(FaultKind.ERROR, applies, errno=errno.ENOSPC)])

    monkeypatch.setattr(nvme_bed, "open_engine", faulty)
    out = tmp_path / "out.json"
    answer = bench("--nvme", disk, *QUICK, "--engine", "threads", "--json", out)
    assert answer.exit_code == 5, answer.output
    assert "No space left on device" in answer.output
    assert "read, 1.00 MiB x 8" in answer.output  # rows were measured before
    assert "GB/s" not in answer.output
    assert not out.exists()
    assert files_below(disk) == []


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_removes_the_files(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, exit_code: int
) -> None:
    """Ctrl-C and SIGTERM in the middle of a measurement: the files go, no results are written, the exit code says which."""
    seen: list[list[Path]] = []

    def interrupt() -> None:
        seen.append(files_below(disk))
        if seen[0]:  # the benchmark runs, so its handlers are in place
            os.kill(os.getpid(), number)

    def phase(_: PlainObserver, text: str) -> None:
        if text.startswith("threads, read"):
            threading.Timer(0.2, interrupt).start()

    monkeypatch.setattr(PlainObserver, "phase", phase)
    out = tmp_path / "out.json"
    answer = bench("--nvme", disk, *QUICK, "--engine", "threads", "--op", "read", "--seconds", "60", "--json", out)
    assert answer.exit_code == exit_code, answer.output
    assert disk / "infinity-bench" / "swap.bin" in seen[0]
    assert "GB/s" not in answer.output
    assert files_below(disk) == []
    assert not out.exists()


def test_a_stop_in_the_middle_of_writing_is_a_stop(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes that the end cancels were not waited for, which is an error of their engine; the exit code is the signal's."""

    class Reporting(FaultyEngine):
        def close(self) -> None:
            super().close()
            raise StorageError("3 request(s) failed and nobody waited for them")

    def reporting(kind: str, *, queue_depth: int, block_bytes: int) -> Engine:
        inner = open_engine(kind, queue_depth=queue_depth, block_bytes=block_bytes)
        return Reporting(inner, []) if block_bytes == 4096 else inner

    def phase(_: PlainObserver, text: str) -> None:
        if text.startswith("threads, write, 4.00 KiB"):
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(nvme_bed, "open_engine", reporting)
    monkeypatch.setattr(PlainObserver, "phase", phase)
    quick = ["--size", "64MiB", "--block-size", "4KiB", "--queue-depth", "8", "--seconds", "60", "--long-run", "0"]
    answer = bench("--nvme", disk, *quick, "--engine", "threads", "--op", "write")
    assert answer.exit_code == 143, answer.output
    assert files_below(disk) == []


def test_another_benchmark_may_remove_the_directory_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that begin in a directory that is absent: one ends and removes it while the other begins, which makes it again.

    From then on the other's own files keep it there.
    """
    directory, rivals = tmp_path / "new", [1, 2]
    claim = nvme_places.claim_run

    def claim_late(path: Path, run_name: str) -> RunDirectory:
        if rivals:
            rivals.pop()
            path.rmdir()
        claimed = claim(path, run_name)
        with pytest.raises(OSError, match="not empty"):
            path.rmdir()
        return claimed

    monkeypatch.setattr(nvme_places, "claim_run", claim_late)
    answer = bench("--nvme", directory, *QUICK, "--op", "read", "--engine", "threads")
    assert answer.exit_code == 0, answer.output
    assert rivals == []
    assert not directory.exists()


def test_what_a_killed_benchmark_left_is_removed_by_the_next(disk: Path) -> None:
    """A benchmark that was killed leaves a dead run; the next one removes it and says so, and nothing else (C20)."""
    code = (
        "import os, sys; from pathlib import Path; from infinity.store.directory import claim_run\n"
        "run = claim_run(Path(sys.argv[1]), 'bench'); (run.path / 'swap.bin').write_bytes(bytes(8192)); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(disk)], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    (disk / "mine").write_text("mine")
    assert [run.state for run in list_runs(disk)] == [RunState.DEAD]
    answer = bench("--nvme", disk, *QUICK, "--op", "read", "--engine", "threads")
    assert answer.exit_code == 0, answer.output
    assert "the files of a dead run" in answer.stdout
    assert files_below(disk) == [disk / "mine"]


def test_tuning_writes_a_configuration_that_training_takes(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--tune writes a new file, never over one that is there, and `infinity train --config` means what was found (C145)."""
    monkeypatch.setattr(nvme_tune, "_TRIAL_SECONDS", 0.02)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "infinity-nvme.json").write_text("mine")
    answer = bench("--nvme", disk, "--tune", "--size", "256MiB", "--engine", "threads", "--json", "out.json")
    assert answer.exit_code == 0, answer.output
    assert (tmp_path / "infinity-nvme.json").read_text() == "mine"
    assert "infinity train --config infinity-nvme-2.json" in answer.stdout
    written, found = json.loads(Path("infinity-nvme-2.json").read_text()), json.loads(Path("out.json").read_text())
    assert found["config"] == written
    assert {row["op"] for row in found["results"]} == {"read", "write"}
    config = resolve_config([file_layer(Path("infinity-nvme-2.json"))], model="gpt-1m", steps=1, has_native_bf16=True)
    assert config.aio.block_size == written["aio"]["block_size"]
    assert config.nvme_directories == (disk,)
    assert files_below(disk) == []
