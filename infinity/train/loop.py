"""The loop over steps, on each rank of a run: training, checkpoints, evaluations, and what all of that came to."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from numpy import uint8
from numpy.typing import NDArray
from torch import Tensor

from infinity import __version__
from infinity.data.sampler import EvenWindows, RandomWindows
from infinity.errors import Diverged
from infinity.memory.limits import peak_rss_bytes
from infinity.models.presets import parameter_count
from infinity.placement.plan import Link
from infinity.states import Tier
from infinity.telemetry.recorder import Recorder
from infinity.telemetry.trace import write_chrome_trace
from infinity.train.contract import TrainingEngine
from infinity.train.output import Output, held
from infinity.train.position import Position, position_record, read_position
from infinity.train.preflight import Checked
from infinity.train.records import Records, open_records
from infinity.train.reporter import Progress, Reporter, StepRecord
from infinity.train.stopping import StopRequest, stop_request
from infinity.train.summary import Evaluation, Summary, Totals, mean, versions
from infinity.train.together import Together
from infinity.train.voice import Voice
from infinity.train.weights import give_weights, save_weights

OpenEngine = Callable[[Checked, Reporter], TrainingEngine]
# What moves in a step, and may also move between two steps.
_MOVED = ("nvme_read_bytes", "nvme_write_bytes", "all_gather_bytes", "reduce_scatter_bytes", "broadcast_bytes")


def train(checked: Checked, reporter: Reporter, open_engine: OpenEngine) -> Summary:
    """Train as `checked` says, from its checkpoint if it has one, and return what came of it.

    Every rank of a run calls it; rank 0 alone shows and writes. SIGINT and SIGTERM, on any rank, end the run after the step
    in flight, with a checkpoint; Summary.exit_code says so. Raises DoesNotFit, OverBudget, StorageError, CheckpointError,
    ModelError, DataError; CommError where another rank has failed; Stopped for a signal that cannot wait.
    """
    with checked.undo as undo:
        summary = _run(checked, Voice(reporter, checked.notes), open_engine)
        undo.pop_all()
    reporter.summary(summary.rows())
    return summary


def _run(checked: Checked, voice: Voice, open_engine: OpenEngine) -> Summary:
    speaks = checked.ranks.speaks
    with stop_request() as request, ExitStack() as stack:
        if speaks:
            stack.enter_context(held(checked.output))
        engine = stack.enter_context(open_engine(checked, voice))
        together = Together(engine.group, request, voice)
        checked = _in_the_places_of_rank_0(checked, together)
        position = _resume(checked, engine, voice)
        records = stack.enter_context(open_records(checked.output, writes=speaks))
        records.begin(
            config=checked.config.effective(),
            plan={**engine.plan.to_json(), "configuration": _configuration(checked)},
        )
        num_dropped = records.cut_after(position.step)
        if num_dropped:
            voice.note(f"Removed {num_dropped} lines of {checked.output.metrics}: the steps after {position.step} are new.")
        loop = Loop(checked, engine, voice, request, together, records, position)
        loop.run()
        summary = loop.finish()
        records.end(summary.as_json())
        if speaks and checked.options.trace is not None:
            _write_trace(checked.options.trace, engine.recorder, voice)
    return summary


def _in_the_places_of_rank_0(checked: Checked, together: Together) -> Checked:
    """Return a rank's preflight with the output directory and the checkpoint that rank 0 found: they are one for a run."""
    resume_from = None if checked.resume_from is None else str(checked.resume_from)
    found = together.from_rank_0({"output": str(checked.output.directory), "resume_from": resume_from}, what="places")
    return replace(
        checked,
        output=Output(Path(found["output"] or "")),
        resume_from=None if found["resume_from"] is None else Path(found["resume_from"]),
    )


def _configuration(checked: Checked) -> dict[str, object]:
    """Return every key that counts with its value and where that comes from."""
    return {path: sourced._asdict() for path, sourced in checked.config.resolved(checked.ranks.world_size).items()}


def _write_trace(path: Path, recorder: Recorder, reporter: Reporter) -> None:
    spans = recorder.spans()
    write_chrome_trace(path, spans)
    num_all = len(spans) + recorder.num_spans_dropped
    what = f"{num_all} spans" if num_all == len(spans) else f"the last {len(spans)} of {num_all} spans"
    reporter.note(f"Trace: {path}, {what}. Open it in ui.perfetto.dev.")


class Loop:
    """One run's steps. Owned by the training thread; after an error only the engine's `close` is of use."""

    def __init__(
        self, checked: Checked, engine: TrainingEngine, reporter: Reporter, request: StopRequest, together: Together,
        records: Records, position: Position,
    ) -> None:  # fmt: skip
        self.position = position
        self._checked = checked
        self._engine = engine
        self._reporter = reporter
        self._request = request
        self._together = together
        self._records = records
        self._totals = Totals()
        self._evaluations: list[Evaluation] = []
        self._saved: tuple[int, str] | None = None  # step, path
        self._carried: Counter[str] = Counter()  # counted between two steps; belongs to the first, is shown with the second
        self._windows = RandomWindows(
            checked.corpus, checked.config.seed, checked.options.seq_len, checked.batch.micro_batch_size
        )

    def run(self) -> None:
        """Train until the last step or a signal; leave a checkpoint where one is due, and where the gradients diverge."""
        options = self._checked.options
        self._request.wait_for_steps(self._reporter.note)
        self._together.meet()
        while self.position.step < options.steps and self._request.agreed is None:
            try:
                self._step()
            except Diverged:  # the weights are those of the last step that was applied, on every rank
                if self._totals.steps:
                    self._save()
                raise
            if options.checkpoint_every and self.position.step % options.checkpoint_every == 0:
                self._save()
            if options.eval_every and self.position.step % options.eval_every == 0:
                self._evaluate()
            self._together.meet()
        if self._totals.steps and (self._request.agreed or options.checkpoint_every):
            self._save()

    def finish(self) -> Summary:
        """Evaluate and export, unless a signal ended the run, and sum up."""
        self._settle()
        weights = None
        if self._request.agreed is None:
            self._evaluate()
            self._together.meet()
            if self._checked.options.save_weights and self._request.agreed is None:
                weights = self._save_weights()
                self._together.meet()
        if self._totals.steps and self._request.agreed:  # it came after the last step; a checkpoint was announced
            self._save()
        return self._summary(weights)

    def _step(self) -> None:
        checked, step = self._checked, self.position.step
        started = time.perf_counter()
        micro_batches = [
            _micro_batch(self._windows.tokens(step, index), self._engine.device)
            for index in checked.batch.micro_batches_of(self._together.rank)
        ]
        with self._engine.recorder.span("step", number=step + 1):
            result = self._engine.train_batch(micro_batches)
        seconds = time.perf_counter() - started
        tokens = checked.batch.train_batch_size * checked.options.seq_len
        self.position = Position(step + 1, self.position.tokens + tokens)
        carried, self._carried = self._carried, Counter()
        record = StepRecord(
            step=step + 1, loss=result.loss, grad_norm=result.grad_norm, lr=result.lr, tokens=tokens, step_seconds=seconds,
            tokens_per_second=tokens / seconds, unit_loads=result.unit_loads,
            cpu_memory_peak_bytes=self._engine.ledger.peak(Tier.CPU), rss_peak_bytes=peak_rss_bytes(),
            skipped=result.skipped, loss_scale=result.loss_scale,
            **{name: getattr(result, name) + carried[name] for name in _MOVED},
        )  # fmt: skip
        self._totals.add(record)
        self._records.step(record)
        if record.skipped:
            at_scale = f" at a loss scale of {record.loss_scale:g}" if record.loss_scale != 1 else ""
            self._reporter.note(
                f"Step {record.step} was skipped: the gradient of {result.first_not_finite} is not finite{at_scale}. "
                "Weights and lr stay."
            )
        self._reporter.step(record, self._progress())

    def _progress(self) -> Progress:
        ledger, num_steps = self._engine.ledger, self._checked.options.steps
        return Progress(
            num_steps=num_steps,
            seconds_left=self._totals.seconds_left(num_steps - self.position.step),
            cpu_memory_bytes=ledger.used(Tier.CPU),
            cpu_memory_budget_bytes=ledger.budget(Tier.CPU),
        )

    def _save(self) -> None:
        if self._saved is not None and self._saved[0] == self.position.step:
            return
        self._reporter.phase(f"Writing the checkpoint of step {self.position.step}")
        with self._interlude("checkpoint"):
            path = self._engine.save_checkpoint(
                self._checked.output.checkpoints,
                client_state=position_record(self.position, self._checked),
                keep=self._checked.options.keep,
            )
        self._saved = (self.position.step, str(path))
        self._reporter.note(f"Checkpoint of step {self.position.step}: {path}")

    def _evaluate(self) -> None:
        checked, step = self._checked, self.position.step
        done = bool(self._evaluations) and self._evaluations[-1].step == step
        if checked.eval_corpus is None or done:
            return
        self._reporter.phase("Evaluating")
        windows = EvenWindows(
            checked.eval_corpus, checked.options.seq_len, checked.batch.micro_batch_size, checked.options.eval_batches
        )
        with self._interlude("evaluation"):
            self._engine.eval()
            with torch.no_grad():
                losses = self._together.in_turn(list(self._losses(windows)))
            self._engine.train()
        self._evaluations.append(Evaluation(step, sum(losses) / len(losses)))
        self._reporter.note(f"Evaluation after step {step}: {self._evaluations[-1].loss:.4f} nats per byte.")

    def _losses(self, windows: EvenWindows) -> Iterator[float]:
        """Yield the losses of the batches whose turn is this rank's; a rank without one takes part with the last batch."""
        last = windows.num_batches - 1
        for first in range(0, windows.num_batches, self._together.size):
            index = first + self._together.rank
            loss = float(self._engine(**_micro_batch(windows.tokens(min(index, last)), self._engine.device)))
            if index <= last:
                yield loss

    def _save_weights(self) -> str | None:
        """Return where rank 0 has written the weights."""
        self._reporter.phase("Writing the weights")
        path = None
        if self._checked.ranks.speaks:
            path = str(save_weights(self._engine, self._checked.gpt, self._checked.output.weights))
        else:
            give_weights(self._engine)
        return self._together.from_rank_0({"weights": path}, what="weights")["weights"]

    @contextlib.contextmanager
    def _interlude(self, name: str) -> Iterator[None]:
        """Keep the bytes of a checkpoint or an evaluation out of the steps' counts, but not those of a pending update."""
        self._settle()
        with self._engine.recorder.span(name):
            yield
        self._engine.recorder.take_counters()

    def _settle(self) -> None:
        self._engine.synchronize()
        self._carried.update(self._engine.recorder.take_counters())

    def _summary(self, weights: str | None) -> Summary:
        checked, totals, ledger, plan = self._checked, self._totals, self._engine.ledger, self._engine.plan
        moved = {name: getattr(totals, name) + self._carried[name] for name in _MOVED}
        read_bytes, write_bytes = moved["nvme_read_bytes"], moved["nvme_write_bytes"]
        facts = self._together.facts(
            cpu_memory_peak_bytes=ledger.peak(Tier.CPU),
            rss_peak_bytes=peak_rss_bytes(),
            nvme_read_bytes=read_bytes,
            nvme_write_bytes=write_bytes,
        )
        mine = facts[self._together.rank]
        return Summary(
            model=checked.options.model,
            parameters=parameter_count(checked.gpt),
            steps=self.position.step,
            steps_in_this_process=totals.steps,
            skipped_steps=totals.skipped_steps,
            final_loss=totals.last_loss,
            mean_loss_of_last_steps=mean(totals.recent_losses),
            evaluations=tuple(self._evaluations),
            tokens=totals.tokens,
            seconds=totals.seconds,
            tokens_per_second=totals.tokens / totals.seconds if totals.seconds else 0.0,
            **moved,
            nvme_bytes_per_second=(read_bytes + write_bytes) / totals.seconds if totals.seconds else 0.0,
            nvme_predicted_bytes_per_second=plan.nvme_bytes_per_second,
            unit_loads=totals.unit_loads,
            cpu_memory_peak_bytes=mine.cpu_memory_peak_bytes,
            rss_peak_bytes=mine.rss_peak_bytes,
            median_bytes_between_ranks=totals.median_bytes_between_ranks,
            predicted_bytes_between_ranks=sum(
                line.num_bytes - line.bytes_in_slots for line in plan.links if line.link is Link.RANKS
            ),
            stage=plan.stage,
            gradient_reduction=plan.gradient_reduction if self._together.size > 1 else None,
            num_ranks=self._together.size,
            ranks=facts,
            placement=plan.to_json(),
            engine=self._engine.io.engine if plan.uses_nvme else "none",
            registered_files=self._engine.io.registered_files,
            registered_buffers=self._engine.io.registered_buffers,
            checksums=plan.uses_nvme and checked.config.infinity.checksums,
            precision=checked.config.precision,
            resumed_from=str(checked.resume_from) if checked.resume_from else None,
            checkpoint=self._saved[1] if self._saved else None,
            weights=weights,
            stopped_by=self._request.agreed.name if self._request.agreed else None,
            exit_code=self._request.exit_code,
            versions=versions(infinity=__version__, torch=torch.__version__),
        )


def _resume(checked: Checked, engine: TrainingEngine, reporter: Reporter) -> Position:
    if checked.resume_from is None:
        return Position()
    reporter.phase(f"Reading the checkpoint {checked.resume_from}")
    record: Mapping[str, object] = engine.load_checkpoint(checked.resume_from)[1]
    position, differences = read_position(record, checked)
    for sentence in differences:
        reporter.note(sentence)
    reporter.note(f"Goes on after step {position.step}, from {checked.resume_from}.")
    if position.step >= checked.options.steps:
        reporter.note(f"--steps {checked.options.steps} are done: give more steps to train on, or another --output.")
    return position


def _micro_batch(tokens: NDArray[uint8], device: torch.device) -> dict[str, Tensor]:
    """Split [B, T + 1] bytes into tokens and targets, int64 [B, T] each."""
    both = torch.from_numpy(tokens).to(device=device, dtype=torch.int64)
    return {"tokens": both[:, :-1].contiguous(), "targets": both[:, 1:].contiguous()}
