"""The loop on an engine that trains one number: what it leaves on disk, how it stops and how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from training_fakes import FakeEngine, Remembering, fake_options, opener

from infinity.config import Config, Layer
from infinity.errors import CheckpointError, CheckpointMismatch, ConfigError, Diverged, StorageError
from infinity.models.presets import parameter_count, preset
from infinity.telemetry.jsonl import read_jsonl
from infinity.train.loop import train
from infinity.train.options import resolve_config
from infinity.train.output import Output, held
from infinity.train.preflight import Checked, check_run
from infinity.train.summary import Summary

METRICS = [
    "step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second", "nvme_read_bytes", "nvme_write_bytes",
    "unit_loads", "cpu_memory_peak_bytes", "rss_peak_bytes", "skipped", "loss_scale", "all_gather_bytes",
    "reduce_scatter_bytes", "broadcast_bytes",
]  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A file with bytes enough for many different windows."""
    path = tmp_path / "text"
    path.write_bytes(bytes((i * i + 7) % 251 for i in range(5000)))
    return path


def run(output: Path, data: Path, engine: FakeEngine | None = None, **changes: Any) -> tuple[Summary, Remembering]:
    reporter = Remembering()
    checked = check_run(fake_options(output, data, **changes), reporter)
    return train(checked, reporter, opener(engine or FakeEngine())), reporter


def losses(output: Path) -> list[object]:
    return [record["loss"] for record in read_jsonl(output / "metrics.jsonl")]


def test_a_run_leaves_plan_metrics_and_summary(tmp_path: Path, data: Path) -> None:
    """plan.json, one line of metrics a step with exactly the promised fields, and summary.json are there; nothing else."""
    output = tmp_path / "out"
    engine = FakeEngine()
    summary, reporter = run(output, data, engine)
    records = read_jsonl(output / "metrics.jsonl")
    assert [list(record) for record in records] == [METRICS] * 6
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert {record["tokens"] for record in records} == {2 * 3 * 16}
    assert len(reporter.records) == 6
    written = json.loads((output / "summary.json").read_text())
    assert written["parameters"] == parameter_count(preset("gpt-1m")) == summary.parameters
    assert (written["steps"], written["tokens"], written["unit_loads"]) == (6, 6 * 96, 24)
    assert (written["nvme_read_bytes"], written["nvme_write_bytes"]) == (600, 300)
    assert written["final_loss"] == records[-1]["loss"]
    assert {"infinity", "torch", "python"} <= set(written["versions"])
    plan = json.loads((output / "plan.json").read_text())
    assert plan.keys() == {"fake", "configuration"}
    assert plan["configuration"]["train_micro_batch_size_per_gpu"]["value"] == 2
    assert plan["configuration"]["zero_optimization.stage"] == {"value": None, "source": "default"}
    saved = Config.from_any(output / "config.json")
    assert saved.effective() == json.loads((output / "config.json").read_text())
    assert {path.name for path in output.iterdir()} == {
        "config.json",
        "plan.json",
        "metrics.jsonl",
        "summary.json",
        "run.lock",
    }
    assert engine.closed
    assert summary.exit_code == 0


def test_bytes_are_those_of_steps_alone(tmp_path: Path, data: Path) -> None:
    """Every update's bytes are counted once, the last one's too; checkpoints and evaluations add nothing."""
    summary, reporter = run(tmp_path / "out", data, steps=6, checkpoint_every=2, hold_out=0.1, eval_every=3)
    assert (summary.nvme_read_bytes, summary.nvme_write_bytes) == (6 * 100, 6 * 50)
    assert [record.nvme_write_bytes for record in reporter.records] == [0, 50, 50, 50, 50, 50]
    assert {record.nvme_read_bytes for record in reporter.records} == {100}


def test_resume_continues_bit_for_bit_and_cuts_the_metrics_back(tmp_path: Path, data: Path) -> None:
    """A run that failed at step 8, after its checkpoint of step 6, gives on resume the losses of an uninterrupted one."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run(whole, data, steps=9)
    with pytest.raises(OSError, match="No space"):
        run(broken, data, FakeEngine(fail_at=8), steps=9, checkpoint_every=3)
    assert len(losses(broken)) == 7
    summary, reporter = run(broken, data, steps=9, checkpoint_every=3)
    assert losses(broken) == losses(whole)
    assert [record.step for record in reporter.records] == [7, 8, 9]
    assert (summary.steps, summary.steps_in_this_process) == (9, 3)
    assert summary.resumed_from == str(broken / "checkpoints" / "step-00000006")


def test_checkpoints_are_kept_up_to_the_given_number(tmp_path: Path, data: Path) -> None:
    """Of the checkpoints of steps 2, 4, 6 and the last one, the newest two stay."""
    summary, _ = run(tmp_path / "out", data, steps=7, checkpoint_every=2, keep=2)
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000007"]
    assert summary.checkpoint is not None
    assert summary.checkpoint.endswith("step-00000007")


def test_a_finished_run_goes_on_when_more_steps_are_asked_for(tmp_path: Path, data: Path) -> None:
    """Resume from the last checkpoint with a larger --steps trains only the difference."""
    run(tmp_path / "out", data, steps=4, checkpoint_every=4)
    summary, _ = run(tmp_path / "out", data, steps=6)
    assert summary.steps_in_this_process == 2
    summary, reporter = run(tmp_path / "out", data, steps=4)
    assert summary.steps_in_this_process == 0
    assert any("--steps 4 are done: give more steps" in note for note in reporter.notes)
    assert not [row for row in reporter.rows if "nan" in row.value]


def test_resume_from_a_named_checkpoint_into_another_directory(tmp_path: Path, data: Path) -> None:
    """--resume PATH takes a checkpoint, the directory that holds them, or the output of the run that wrote them."""
    run(tmp_path / "a", data, steps=4, checkpoint_every=2)
    all_of_them = tmp_path / "a" / "checkpoints"
    for number, path in enumerate((all_of_them / "step-00000002", all_of_them, tmp_path / "a")):
        summary, _ = run(tmp_path / f"b{number}", data, steps=6, resume=str(path))
        assert summary.steps_in_this_process == (4, 2, 2)[number]


def test_a_resumed_run_says_when_its_data_differ(tmp_path: Path, data: Path) -> None:
    """Another corpus size is named, since the run is then no longer that of the checkpoint."""
    run(tmp_path / "out", data, steps=2, checkpoint_every=2)
    data.write_bytes(data.read_bytes() + b"more")
    _, reporter = run(tmp_path / "out", data, steps=3)
    assert any("corpus_bytes was 5000 in the checkpoint and is 5004 now" in note for note in reporter.notes)


def test_a_resumed_run_says_which_options_differ(tmp_path: Path, data: Path) -> None:
    """Equal options are passed over; a learning rate, a clip or a number of steps that changed is named with both values."""
    run(tmp_path / "out", data, steps=2, checkpoint_every=2)
    _, reporter = run(tmp_path / "out", data, steps=2)
    assert not [note for note in reporter.notes if "bit for bit" in note]
    options = fake_options(tmp_path / "out", data, steps=3)
    changes = Layer("test", {"optimizer.params.lr": 0.5, "gradient_clipping": 0.25, "train_batch_size": 6})
    config = resolve_config([changes], model="gpt-1m", steps=3, has_native_bf16=False)
    reporter = Remembering()
    train(check_run(replace(options, config=config), reporter), reporter, opener(FakeEngine()))
    said = " ".join(reporter.notes)
    for name, before, now in (
        ("optimizer.params.lr", 0.001, 0.5),
        ("gradient_clipping", 1.0, 0.25),
        ("scheduler.params.total_num_steps", 2, 3),
    ):
        assert f"{name} was {before} in the checkpoint and is {now} now" in said


def test_a_run_whose_checkpoints_are_all_broken_does_not_start_anew(tmp_path: Path, data: Path) -> None:
    """--resume auto says which checkpoints are not whole and why, and touches nothing; --resume none trains anew and says

    what it drops.
    """
    output = tmp_path / "out"
    run(output, data, steps=4, checkpoint_every=2)
    for path in (output / "checkpoints").iterdir():
        (path / "manifest.json").unlink()
    before = (output / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"--resume auto.*step-00000004 was passed over.*step-00000002") as caught:
        run(output, data, steps=4)
    assert "--resume none" in caught.value.remedy
    assert (output / "metrics.jsonl").read_bytes() == before
    summary, reporter = run(output, data, steps=4, resume="none")
    assert summary.steps_in_this_process == 4
    assert any("Removed 4 lines of" in note for note in reporter.notes)


def test_metrics_that_are_dropped_are_said(tmp_path: Path, data: Path) -> None:
    """A second run into the same directory, without a checkpoint, replaces the first one's metrics and says so."""
    run(tmp_path / "out", data, steps=4)
    summary, reporter = run(tmp_path / "out", data, steps=3)
    assert summary.steps == 3
    assert len(losses(tmp_path / "out")) == 3
    assert any("Removed 4 lines of" in note for note in reporter.notes)


def test_a_trace_shows_what_happened_when(tmp_path: Path, data: Path) -> None:
    """--trace leaves a file of the Chrome trace event format with a span for every step and checkpoint."""
    trace = tmp_path / "trace.json"
    _, reporter = run(tmp_path / "out", data, steps=4, checkpoint_every=2, trace=trace)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert [event["args"]["number"] for event in events if event["name"] == "step"] == [1, 2, 3, 4]
    assert sum(event["name"] == "checkpoint" for event in events) == 2
    assert any(str(trace) in note for note in reporter.notes)


def test_a_signal_in_the_last_evaluation_gets_its_checkpoint(tmp_path: Path, data: Path) -> None:
    """After the last step a signal is announced like any other, and the checkpoint is written; the weights are not."""

    class Signalled(FakeEngine):
        def __call__(self, **tokens: Any) -> Any:
            signal.raise_signal(signal.SIGTERM)
            return super().__call__(**tokens)

    summary, reporter = run(tmp_path / "out", data, Signalled(), steps=3, hold_out=0.1, eval_batches=1, save_weights=True)
    assert any("SIGTERM: this step ends first, then a checkpoint" in note for note in reporter.notes)
    assert (summary.exit_code, summary.stopped_by) == (143, "SIGTERM")
    assert [path.name for path in (tmp_path / "out" / "checkpoints").iterdir()] == ["step-00000003"]
    assert not (tmp_path / "out" / "weights").exists()


def test_foreign_checkpoints_and_contradicting_resumes_are_refused(tmp_path: Path, data: Path) -> None:
    """A missing path, a file, an empty directory, a checkpoint of the Python API, and none beside checkpoints are errors."""
    output = tmp_path / "out"
    run(output, data, steps=2, checkpoint_every=2)
    with pytest.raises(ConfigError, match="--resume none"):
        run(output, data, resume="none")
    for path, words in ((tmp_path / "absent", "is absent"), (data, "is a file"), (tmp_path, "no complete checkpoint")):
        with pytest.raises(CheckpointError, match=words):
            run(tmp_path / "new", data, resume=str(path))
    FakeEngine().save_checkpoint(tmp_path / "api", client_state={}, keep=1)
    with pytest.raises(CheckpointMismatch, match="not written by infinity train"):
        run(tmp_path / "new", data, resume=str(tmp_path / "api"))
    assert not (tmp_path / "new").exists()


def test_skipped_steps_are_said_and_counted(tmp_path: Path, data: Path) -> None:
    """A step with a non-finite gradient is null and skipped in the metrics, said in a note, counted in the summary."""
    summary, reporter = run(tmp_path / "out", data, FakeEngine(skip_steps=[2, 6]))
    records = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    assert [record["skipped"] for record in records] == [False, True, False, False, False, True]
    assert records[1]["loss"] is None
    assert records[1]["grad_norm"] is None
    assert summary.skipped_steps == 2
    assert sum("was skipped: the gradient of head.weight" in note for note in reporter.notes) == 2
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["final_loss"] is None


def test_evaluation_uses_its_own_data_in_eval_mode(tmp_path: Path, data: Path) -> None:
    """With --eval-every the loss over the even windows is taken at those steps and at the end, once each."""
    other = tmp_path / "other"
    other.write_bytes(b"a" * 100)
    engine = FakeEngine()
    summary, _ = run(tmp_path / "out", data, engine, steps=6, eval_data=other, eval_every=3, eval_batches=2)
    assert [(entry.step, entry.loss) for entry in summary.evaluations] == [(3, 97.0), (6, 97.0)]
    assert engine.evaluated == [97] * 4


def test_held_out_data_are_the_end_of_the_corpus(tmp_path: Path, data: Path) -> None:
    """--hold-out takes the last share away from training and evaluates on it."""
    engine = FakeEngine()
    checked = check_run(fake_options(tmp_path / "out", data, hold_out=0.1, eval_batches=1), Remembering())
    assert checked.corpus.num_bytes == 4500
    train(checked, Remembering(), opener(engine))
    assert engine.evaluated == [(4500 * 4500 + 7) % 251]


def test_saved_weights_are_a_safetensors_file(tmp_path: Path, data: Path) -> None:
    """--save-weights leaves every parameter in fp32 under its name, in whatever order the engine gives them."""
    summary, _ = run(tmp_path / "out", data, save_weights=True)
    assert summary.weights is not None
    with safe_open(summary.weights, framework="pt") as file:
        names = file.keys()
        assert len(names) == 5 * 6 + 3
        assert all((file.get_tensor(name) == len(name)).all() for name in names)


def test_two_runs_never_share_an_output(tmp_path: Path, data: Path) -> None:
    """A second run into a directory that another process holds is refused; nothing of the first is touched."""
    output = Output(tmp_path / "out")
    with held(output), pytest.raises(StorageError, match="another run is writing"), held(output):
        pass
    assert not output.directory.exists()


def test_a_failed_start_leaves_no_directory(tmp_path: Path, data: Path) -> None:
    """When the engine cannot be opened, the directories that were made for the run, the NVMe one too, are gone again."""

    def refuse(checked: object, reporter: object) -> FakeEngine:
        raise StorageError("too small")

    nvme = [tmp_path / "made", tmp_path / "used", tmp_path / "old"]
    nvme[2].mkdir()
    options = fake_options(tmp_path / "runs" / "deep" / "out", data, nvme=nvme)
    checked = check_run(options, Remembering())
    (nvme[1] / "of-the-user").touch()
    with pytest.raises(StorageError, match="too small"):
        train(checked, Remembering(), refuse)
    assert not (tmp_path / "runs").exists()
    assert [path.exists() for path in nvme] == [False, True, True]


def test_an_output_removed_in_mid_run_does_not_hide_the_error(tmp_path: Path, data: Path) -> None:
    """What the run itself met is what is raised, although its directory is gone when it ends."""

    def fail(checked: Checked, reporter: object) -> FakeEngine:
        shutil.rmtree(checked.output.directory)
        raise StorageError("the disk is gone")

    checked = check_run(fake_options(tmp_path / "out", data), Remembering())
    with pytest.raises(StorageError, match="the disk is gone"):
        train(checked, Remembering(), fail)


def start(output: Path, data: Path, steps: int, step_seconds: float) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("fake_run.py")
    arguments = [sys.executable, str(script), str(output), str(data), str(steps), str(step_seconds)]
    environment = os.environ | {"PYTHONPATH": str(script.parents[2])}
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the run never said {text!r}: {process.communicate()}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_and_leaves_a_checkpoint(tmp_path: Path, data: Path, number: signal.Signals) -> None:
    """SIGINT and SIGTERM end the run with 128 + the number; the checkpoint is that of the last step in the metrics."""
    output = tmp_path / "out"
    process = start(output, data, 1000, 0.05)
    wait_for(process, "step 2")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert f"{number.name}: this step ends first" in out
    summary = json.loads((output / "summary.json").read_text())
    assert summary["stopped_by"] == number.name
    last = read_jsonl(output / "metrics.jsonl")[-1]["step"]
    assert [path.name for path in (output / "checkpoints").iterdir()] == [f"step-{last:08d}"]
    resumed, _ = run(output, data, steps=int(str(last)) + 2)
    assert resumed.steps_in_this_process == 2


def test_a_second_signal_stops_at_once(tmp_path: Path, data: Path) -> None:
    """The second signal does not wait for a step of ten minutes; no checkpoint is written, the code is the signal's."""
    process = start(tmp_path / "out", data, 10, 600)
    wait_for(process, "begins 1")
    process.send_signal(signal.SIGTERM)
    wait_for(process, "this step ends first")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Stopped." in err
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "checkpoints").exists()


class DivergingEngine(FakeEngine):
    """Takes so many steps, and finds no finite gradient after them."""

    num_steps = 4

    def train_batch(self, micro_batches: Any) -> Any:
        if self.steps == self.num_steps:
            raise Diverged("2 steps in a row had gradients that are not finite, in the last one at layers.2.weight.")
        return super().train_batch(micro_batches)


def test_a_run_that_diverges_leaves_a_checkpoint(tmp_path: Path, data: Path) -> None:
    """C78: the weights of the last applied step are saved before the error ends the run, and a run can go on from them."""
    output = tmp_path / "out"
    with pytest.raises(Diverged, match=r"layers\.2\.weight"):
        run(output, data, DivergingEngine(skip_steps=[4]))
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step-00000004"]
    engine = FakeEngine()
    summary, _ = run(output, data, engine, resume="auto")
    assert (summary.steps, engine.steps) == (6, 6)


def test_a_run_that_diverges_at_once_leaves_none(tmp_path: Path, data: Path) -> None:
    """Before the first step there is nothing to keep."""
    engine = DivergingEngine()
    engine.num_steps = 0
    with pytest.raises(Diverged):
        run(tmp_path / "out", data, engine)
    assert not (tmp_path / "out" / "checkpoints").exists()
