"""The loop on several ranks: the same data, one voice, one set of files, a stop and a failure that all ranks share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors import safe_open
from training_fakes import FakeEngine, Remembering, fake_group, fake_options

from infinity.comm.launched import ONE_RANK, Ranks, launched_ranks
from infinity.errors import CommError, ConfigError
from infinity.telemetry.jsonl import read_jsonl
from infinity.train.loop import train
from infinity.train.preflight import check_run
from infinity.train.reporter import StepRecord
from infinity.train.summary import Summary, Totals

BATCH_SIZE = 12


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file with bytes enough for many different windows."""
    path = tmp_path / "text"
    path.write_bytes(bytes((i * i + 7) % 251 for i in range(5000)))
    return path


def run(
    size: int, output: Path, data: Path, *, batch: int = BATCH_SIZE, **changes: Any
) -> tuple[list[Summary], list[Remembering], list[FakeEngine]]:
    """Train on `size` ranks, a thread each; every rank but the first is given another output and is not to use it."""
    store = dist.HashStore()
    reporters = [Remembering() for _ in range(size)]
    results: dict[int, Any] = {}
    engines: dict[int, FakeEngine] = {}

    def job(rank: int) -> None:
        def open_engine(checked: object, reporter: object) -> FakeEngine:
            engines[rank] = FakeEngine(group=fake_group(store, rank, size))
            return engines[rank]

        try:
            place = output if rank == 0 else output.with_name(f"of-rank-{rank}")
            options = fake_options(place, data, batch_size=batch, **changes)
            checked = check_run(options, reporters[rank], Ranks(rank, rank, size, size))
            results[rank] = train(checked, reporters[rank], open_engine)
        except Exception as error:  # noqa: BLE001 - the test says what it expected
            results[rank] = error

    threads = [threading.Thread(target=job, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[rank] for rank in range(size)], reporters, [engines[rank] for rank in range(size)]


def metrics(output: Path, name: str = "loss") -> list[object]:
    return [record[name] for record in read_jsonl(output / "metrics.jsonl")]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_batch_is_the_same_data_on_any_number_of_ranks(tmp_path: Path, data: Path, size: int) -> None:
    """The losses of a global batch and of an evaluation are equal in every bit on 1, 2 and 3 ranks; each batch runs once."""
    options: dict[str, Any] = {"steps": 4, "hold_out": 0.2, "eval_every": 2, "eval_batches": 5}
    alone, _, [engine] = run(1, tmp_path / "alone", data, **options)
    together, _, engines = run(size, tmp_path / "together", data, **options)
    assert metrics(tmp_path / "together") == metrics(tmp_path / "alone")
    assert set(metrics(tmp_path / "together", "tokens")) == {BATCH_SIZE * 16}
    assert [summary.evaluations for summary in together] == [alone[0].evaluations] * size
    assert len(alone[0].evaluations) == 2
    rounds = -(-5 // size)
    assert [len(engine.evaluated) for engine in engines] == [2 * rounds] * size
    assert {first for engine in engines for first in engine.evaluated} == set(engine.evaluated)


def test_rank_0_alone_writes_and_sums_up_for_all(tmp_path: Path, data: Path) -> None:
    """One output directory, with the checkpoint and the weights; the summary has the peaks and bytes of every rank."""
    summaries, reporters, _ = run(
        2, tmp_path / "out", data, steps=3, checkpoint_every=2, save_weights=True, trace=tmp_path / "trace.json"
    )
    assert not (tmp_path / "of-rank-1").exists()
    assert metrics(tmp_path / "out", "step") == [1, 2, 3]
    assert metrics(tmp_path / "out", "all_gather_bytes") == [30, 30, 30]
    assert summaries[1].checkpoint == summaries[0].checkpoint == str(tmp_path / "out/checkpoints/step-00000003")
    assert summaries[1].weights == summaries[0].weights
    with safe_open(summaries[0].weights, framework="pt") as file:
        assert len(file.keys()) == 5 * 6 + 3
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (written["num_ranks"], written["all_gather_bytes"], written["reduce_scatter_bytes"]) == (2, 90, 60)
    assert (written["stage"], written["gradient_reduction"], written["predicted_bytes_between_ranks"]) == (1, "boundary", 50)
    [words] = [row.value for row in reporters[0].rows if row.name == "Between ranks"]
    assert words == "stage 1: 50 B in the median step (of 50 B planned), gradients reduced once a step"
    assert [one["rank"] for one in written["ranks"]] == [0, 1]
    assert all(one["pss_peak_bytes"] > 0 and one["nvme_read_bytes"] == 300 for one in written["ranks"])
    assert [row.name for row in reporters[0].rows if row.name.startswith("Memory")] == [
        "Memory peak of rank 0",
        "Memory peak of rank 1",
        "Memory peak in all",
    ]
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["configuration"]["gradient_accumulation_steps"] == {"value": 3, "source": "12 = 2 x 3 x 2 ranks"}
    assert (tmp_path / "trace.json").exists()


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path, data: Path) -> None:
    """Saved on 2 ranks, it goes on on 3 and on 1 with the data of an uninterrupted run, and says that bits may differ."""
    run(1, tmp_path / "whole", data, steps=9)
    run(2, tmp_path / "out", data, steps=4, checkpoint_every=4)
    _, reporters, _ = run(3, tmp_path / "out", data, steps=6, checkpoint_every=6)
    said = [note for note in reporters[0].notes if "bit for bit" in note and "scheduler" not in note]
    assert said == ["num_ranks was 2 in the checkpoint and is 3 now: the run goes on, but not bit for bit."]
    run(1, tmp_path / "out", data, steps=9)
    assert metrics(tmp_path / "out") == metrics(tmp_path / "whole")


def test_a_smaller_step_names_what_keeps_the_data(tmp_path: Path, data: Path) -> None:
    """Resumed with another number of sequences in a step, the note has both and the --micro-batches that keep them."""
    run(1, tmp_path / "out", data, steps=2, checkpoint_every=2)
    for size, batch_size, keeps in (
        (1, 6, "--micro-batches 6"),
        (2, 4, "--micro-batches 3"),
        (5, 20, "a train_batch_size of 12"),
    ):
        _, reporters, _ = run(size, tmp_path / "out", data, steps=2, batch=batch_size)
        [said] = [note for note in reporters[0].notes if "sequences" in note]
        assert said == (
            f"A step had 12 sequences in the checkpoint and has {batch_size} now, "
            f"so its data are others, too; {keeps} keeps them."
        )


def test_the_bytes_of_a_step_leave_out_the_unlike_ones() -> None:
    """A first step that moves more, and one after an evaluation that moves less, do not stand beside the plan."""
    totals = Totals()
    assert totals.median_bytes_between_ranks == 0
    for moved in (90, 50, 50, 10, 50):
        totals.add(
            StepRecord(
                step=1, loss=1.0, grad_norm=None, lr=0.1, tokens=1, step_seconds=1.0, tokens_per_second=1.0, unit_loads=0,
                nvme_read_bytes=0, nvme_write_bytes=0, all_gather_bytes=moved, reduce_scatter_bytes=0, broadcast_bytes=0,
                cpu_memory_peak_bytes=0, rss_peak_bytes=0, skipped=False, loss_scale=1.0,
            )
        )  # fmt: skip
    assert totals.median_bytes_between_ranks == 50


@contextmanager
def processes(size: int, *arguments: object) -> Iterator[list[subprocess.Popen[str]]]:
    """The ranks of a run as processes, as a launcher starts them."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = Path(__file__).with_name("fake_rank_run.py")
    shared = {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "PYTHONPATH": str(script.parents[2]), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> list[str]:
    """Return the lines that the process has printed, `text` being in the last of them."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"the run never said {text!r}: {lines}, {process.communicate()}")


def read_to_end(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    lines = list(process.stdout)  # not communicate(), which passes over what was read ahead
    process.wait(timeout=60)
    return lines


def test_a_signal_on_one_rank_stops_all_after_the_same_step(tmp_path: Path, data: Path) -> None:
    """SIGTERM on rank 1 alone: both ranks end with 143 after one step, with its checkpoint; notes are said once."""
    with processes(2, tmp_path / "out", data, 10_000, 0.02, 0) as ranks:
        silent = read_until(ranks[1], "begins 3")
        ranks[1].send_signal(signal.SIGTERM)
        said = "".join(read_to_end(ranks[0]))
        silent += read_to_end(ranks[1])
    assert [rank.returncode for rank in ranks] == [143, 143], said
    assert "Rank 1: SIGTERM: this step ends first" in said
    assert said.count("every rank says this") == 1
    assert said.count("Rank 1: rank 1 says this\n") == 1
    last = metrics(tmp_path / "out", "step")[-1]
    # What rank 1 has to say is said by rank 0, and it has begun no other step.
    assert silent == [f"begins {step}\n" for step in range(1, int(str(last)) + 1)]
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == [f"step-{last:08d}"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["stopped_by"] == "SIGTERM"


def test_a_failure_on_one_rank_ends_all_with_its_reason(tmp_path: Path, data: Path) -> None:
    """Rank 1 ends with its own error and code, rank 0 with one that names rank 1 and quotes the reason."""
    with processes(2, tmp_path / "out", data, 10, 0, 3) as ranks:
        said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [CommError.exit_code, 5], said
    assert "rank 1 has lost its disk" in said[1][1]
    assert "Rank 1 failed" in said[0][1]
    assert "rank 1 has lost its disk" in said[0][1]
    assert metrics(tmp_path / "out", "step") == [1, 2]


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, ONE_RANK),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "3"}, ONE_RANK),
        ({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Ranks(3, 1, 4, 2)),
        ({"WORLD_SIZE": "4", "RANK": "3"}, Ranks(3, 3, 4, 4)),
    ],
)
def test_the_launcher_says_which_rank_this_is(environment: dict[str, str], found: Ranks) -> None:
    """torchrun's variables; without those of the machine all ranks are on one."""
    assert launched_ranks(environment) == found


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2, WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0"),
    ],
)
def test_an_environment_that_names_no_rank_is_refused(environment: dict[str, str], words: str) -> None:
    """The variable is named with its value."""
    with pytest.raises(ConfigError, match=words):
        launched_ranks(environment)
