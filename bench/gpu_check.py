"""One GPU: every placement near the CPU's losses, one set of bits between placements, memory as planned, step times."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import median

import torch
from provenance import markdown_table, write_results

import infinity.engine.build as build
from infinity.errors import InfinityError
from infinity.memory.arena import open_arena
from infinity.memory.device import ComputeDevice, host_device, open_compute_device
from infinity.memory.ledger import Ledger
from infinity.models.gpt import build_meta_gpt, parameter_initializer
from infinity.models.presets import preset
from infinity.states import Tier

PLACEMENTS = {  # where the optimizer state is, where the weights are
    "weights on GPU, optimizer in RAM": ("cpu", "gpu"),
    "weights on GPU, optimizer on NVMe": ("nvme", "gpu"),
    "weights and optimizer in RAM": ("cpu", "cpu"),
    "weights on NVMe, optimizer in RAM": ("cpu", "nvme"),
    "all on NVMe": ("nvme", "nvme"),
}
SMALL, LARGE = "gpt-1m", "gpt-124m"
NUM_STEPS, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE, SEQ_LEN = 5, 2, 2, 256
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # relative to the CPU's loss of the same step
NO_NEW_ROW_SECONDS = 300.0
COPIED_BYTES = 256 << 20


@dataclass(frozen=True)
class Run:
    """What training with one placement left."""

    losses: tuple[float, ...]
    digest: str  # of every master value
    step_seconds: float  # median, without the first step
    gpu_peak_bytes: int
    gpu_planned_bytes: int


@dataclass(frozen=True)
class Row:
    """One placement, judged. Losses and bits are compared for the small model only."""

    model: str
    precision: str
    placement: str
    run: Run | None  # None: it failed
    loss_difference: float | None  # the largest over the steps, relative to the CPU's
    same_bits: bool | None  # as the first placement on the GPU
    verdict: str  # "ok", or what is wrong


def main() -> int:
    """Run the placements, print the table, write the results; return 1 where something is wrong."""
    if not torch.cuda.is_available():
        print("gpu-check is left out: torch sees no CUDA device here.")
        return 0
    started = time.perf_counter()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("NVME")) as directory:
        for row in judged_rows(Path(directory)):
            seconds = time.perf_counter() - started
            print(f"{seconds:6.1f} s  {row.model} {row.precision}, {row.placement}: {row.verdict}", flush=True)
            rows.append(row)
            if seconds > NO_NEW_ROW_SECONDS:
                print(f"No more rows: {NO_NEW_ROW_SECONDS:.0f} s have passed.")
                break
    rates = copy_rates(open_compute_device())
    table = f"{rows_table(rows)}\n\n{', '.join(f'{name} {rate:.1f} GB/s' for name, rate in rates.items())}"
    write_results("gpu_check", {"rows": [asdict(row) for row in rows], "copy_gb_per_second": rates}, "One GPU", table)
    return int(any(row.verdict != "ok" for row in rows))


def judged_rows(directory: Path) -> Iterator[Row]:
    """Yield a row for every placement: the small model in both precisions, then the large one."""
    for precision in LOSS_TOLERANCE:
        expected, first = train(directory, SMALL, precision, ("cpu", "cpu"), compute=host_device()), None
        for placement in PLACEMENTS:
            row = judged(directory, SMALL, precision, placement, expected, first)
            first = first or row.run
            yield row
    for placement in PLACEMENTS:
        yield judged(directory, LARGE, "bf16", placement, None, None)


def judged(directory: Path, model: str, precision: str, placement: str, expected: Run | None, first: Run | None) -> Row:
    """Train on the GPU; compare with the CPU's run and with the first placement's, where they are given."""
    try:
        run = train(directory, model, precision, PLACEMENTS[placement], compute=open_compute_device())
    except (InfinityError, RuntimeError) as error:
        return Row(model, precision, placement, None, None, None, f"{type(error).__name__}: {error}".partition("\n")[0])
    difference = max(map(_difference, run.losses, expected.losses)) if expected is not None else None
    same_bits = (run.digest, run.losses) == (first.digest, first.losses) if first is not None else None
    wrong = []
    if difference is not None and not difference <= LOSS_TOLERANCE[precision]:
        wrong.append(f"losses differ from the CPU's by {difference:.1e}, tolerance {LOSS_TOLERANCE[precision]:.0e}")
    if same_bits is False:
        wrong.append("other bits than the first placement")
    return Row(model, precision, placement, run, difference, same_bits, "; ".join(wrong) or "ok")


def _difference(loss: float, expected: float) -> float:
    return abs(loss / expected - 1)


def train(directory: Path, model: str, precision: str, tiers: tuple[str, str], *, compute: ComputeDevice) -> Run:
    """Train a built-in model for a few steps on random tokens, with deterministic kernels."""
    gpt = preset(model)
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"offload_optimizer": {"device": tiers[0]}, "offload_param": {"device": tiers[1]}},
        "infinity": {"nvme": [str(directory)], "deterministic": True},
    }
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_STEPS, NUM_MICRO_BATCHES, MICRO_BATCH_SIZE, SEQ_LEN + 1)
    tokens = torch.randint(gpt.vocab_size, shape, generator=generator)
    before, build.open_compute_device = build.open_compute_device, lambda: compute
    try:
        made = build.initialize(
            model=build_meta_gpt(gpt, torch.bfloat16 if precision == "bf16" else torch.float32),
            config=config,
            init=parameter_initializer(gpt, seed=0),
        )
    finally:
        build.open_compute_device = before
    losses, seconds, digest = [], [], blake2b(digest_size=16)
    with made.engine as engine:
        for step in tokens:
            start = time.perf_counter()
            losses.append(engine.train_batch([(part[:, :-1], part[:, 1:]) for part in step]).loss)
            seconds.append(time.perf_counter() - start)
        for _, value in engine.full_parameters():
            digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        peak, planned = engine.ledger.peak(Tier.GPU), engine.plan.memory_bytes(Tier.GPU)
    return Run(tuple(losses), digest.hexdigest(), median(seconds[1:]), peak, planned)


def copy_rates(compute: ComputeDevice) -> dict[str, float]:
    """Return GB/s of one copy each way, from a page-locked arena and from an ordinary one."""
    rates = {}
    there = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=compute.torch_device)
    for pin in (True, False):
        with open_arena(COPIED_BYTES, ledger=Ledger({}), tier=Tier.CPU, owner="gpu-check", pin=pin) as arena:
            host = arena.buffer.tensor(torch.uint8, COPIED_BYTES)
            kind = "page-locked" if arena.pinned else "pageable"
            for _ in range(2):  # the first time touches the pages
                start = time.perf_counter()
                compute.transfers.to_device(host, there).source_free.wait()
                middle = time.perf_counter()
                compute.transfers.to_host(there, host).wait()
                end = time.perf_counter()
            compute.transfers.synchronize()
            rates[f"{kind} to the device"] = COPIED_BYTES / (middle - start) / 1e9
            rates[f"{kind} to the host"] = COPIED_BYTES / (end - middle) / 1e9
    return rates


def rows_table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    header = [
        "model",
        "precision",
        "placement",
        "ms a step",
        "GPU peak MiB",
        "planned MiB",
        "loss - CPU's",
        "bits",
        "verdict",
    ]
    return markdown_table(header, [[row.model, row.precision, row.placement, *_numbers(row), row.verdict] for row in rows])


def _numbers(row: Row) -> list[str]:
    if row.run is None:
        return [""] * 5
    return [
        f"{row.run.step_seconds * 1e3:.1f}",
        f"{row.run.gpu_peak_bytes / 2**20:.1f}",
        f"{row.run.gpu_planned_bytes / 2**20:.1f}",
        "" if row.loss_difference is None else f"{row.loss_difference:.1e}",
        {None: "", True: "same", False: "other"}[row.same_bits],
    ]


if __name__ == "__main__":
    sys.exit(main())
