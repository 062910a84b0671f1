"""What crosses to NVMe in a step is what the plan and the formula say, counted by the engine and by the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import TINY_GPT, Bulk, Kit, compute_dtype, finish_ahead, open_engine, settings, train
from torch import nn

from infinity.config import Config
from infinity.engine import Engine
from infinity.models.gpt import GPT
from infinity.models.presets import preset
from infinity.placement import Placement

WIDTH, NUM_LAYERS, NUM_STEPS = 128, 40, 4
NUM_PARAMETERS = NUM_LAYERS * WIDTH * WIDTH
WIDE_BULK = Kit(
    "wide-bulk",
    lambda: Bulk(width=WIDTH, num_layers=NUM_LAYERS),
    lambda generator, step: (torch.randn(2, WIDTH, generator=generator),),
)
PRESET = preset("gpt-1m")


def preset_batch(generator: torch.Generator, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.randint(PRESET.vocab_size, (1, 17), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


GPT_1M = Kit("gpt-1m", lambda: GPT(PRESET), preset_batch)


def kernel_bytes() -> tuple[int, int]:
    """Return the bytes that this process has read from and written to disks."""
    pairs = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(pairs["read_bytes"]), int(pairs["write_bytes"])


class Measured:
    """Bytes and loads of one steady step, as the engine counted them and as the kernel did.

    At both ends all that the slots can take ahead for the next step has been begun, and has come in.
    """

    def __init__(self, engine: Engine, kit: Kit, num_micro_batches: int, dtype: torch.dtype) -> None:
        def take_step(step: int) -> None:
            engine.train_batch(kit.batches(step, num_micro_batches, dtype))
            finish_ahead(engine)

        for step in range(3):
            take_step(step)
        counted, kernel = engine.recorder.counters(), kernel_bytes()
        for step in range(3, 3 + NUM_STEPS):
            take_step(step)
        now, kernel_now = engine.recorder.counters(), kernel_bytes()
        grown = {name: (total - counted.get(name, 0)) / NUM_STEPS for name, total in now.items()}
        self.read_bytes = grown.get("nvme_read_bytes", 0)
        self.write_bytes = grown.get("nvme_write_bytes", 0)
        self.unit_loads = grown.get("unit_loads", 0)
        self.spill_bytes = grown.get("gradient_spill_bytes", 0)
        self.kernel_read_bytes = (kernel_now[0] - kernel[0]) / NUM_STEPS
        self.kernel_write_bytes = (kernel_now[1] - kernel[1]) / NUM_STEPS


def v_r(bf16: bool, sigma: float, omega: float, num_reads: int, gamma: float = 0.0) -> float:
    """Return the bytes read in a step: P (s sigma + n_w w omega + g gamma)."""
    state_bytes, weight_bytes = (10, 2) if bf16 else (8, 4)
    return NUM_PARAMETERS * (state_bytes * sigma + num_reads * weight_bytes * omega + weight_bytes * gamma)


def v_w(bf16: bool, sigma: float, omega: float, gamma: float = 0.0) -> float:
    """Return the bytes written in a step: P (s sigma + w omega + g gamma)."""
    return v_r(bf16, sigma, omega, 1, gamma)


@pytest.mark.parametrize(("optim", "params"), [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "nvme")])
@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("bf16", [True, False], ids=["bf16", "fp32"])
def test_bytes_are_those_of_the_formula(bf16: bool, num_micro_batches: int, optim: str, params: str, nvme: Path) -> None:
    """C18, item 4: V_r and V_w within 3 % for any A in vertical order; gradients that fit stay in RAM.

    From the reads of weights, those of the units in slots at the two turns are left out: 2 slots of 40 layers here.
    """
    config = settings(
        nvme, optim=optim, params=params, bf16=bf16, num_micro_batches=num_micro_batches, tile_bytes="8MiB", weight_slots=2,
        check=False,
    )  # fmt: skip
    with open_engine(WIDE_BULK.build(), config) as engine:
        measured = Measured(engine, WIDE_BULK, num_micro_batches, compute_dtype(config))
        plan = engine.plan
    sigma, omega = float(optim == "nvme"), float(params == "nvme")
    in_slots = omega * 2 * 2 * WIDTH * WIDTH * (2 if bf16 else 4)
    assert measured.read_bytes == pytest.approx(v_r(bf16, sigma, omega, 2) - in_slots, rel=0.03)
    assert measured.write_bytes == pytest.approx(v_w(bf16, sigma, omega), rel=0.03)
    assert measured.read_bytes == pytest.approx(plan.nvme_read_bytes, rel=0.01)
    assert measured.write_bytes == pytest.approx(plan.nvme_write_bytes, rel=0.01)
    assert plan.nvme_formula_read_bytes == pytest.approx(v_r(bf16, sigma, omega, 2), rel=0.03)
    assert measured.spill_bytes == 0
    assert measured.unit_loads == (2 * NUM_LAYERS - 4 if params == "nvme" else 0)


@pytest.mark.parametrize(("optim", "params"), [("nvme", "nvme"), ("nvme", "cpu"), ("cpu", "nvme")])
def test_the_kernel_counts_the_same(optim: str, params: str, nvme: Path) -> None:
    """C18, item 4: /proc/self/io agrees with the engine's counters within 3 %, for reads and for writes."""
    config = settings(nvme, optim=optim, params=params, tile_bytes="64KiB", check=False)
    with open_engine(WIDE_BULK.build(), config) as engine:
        measured = Measured(engine, WIDE_BULK, 1, torch.bfloat16)
    if measured.kernel_read_bytes == 0:
        pytest.skip("this file system does not reach a disk that the kernel counts")
    assert measured.kernel_read_bytes == pytest.approx(measured.read_bytes, rel=0.03)
    assert measured.kernel_write_bytes == pytest.approx(measured.write_bytes, rel=0.03)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_horizontal_order_reads_weights_2a_times(num_micro_batches: int, nvme: Path) -> None:
    """n_w is 2A in horizontal order, less the turns; everything else is as in vertical order."""
    config = settings(
        nvme, optim="nvme", params="nvme", num_micro_batches=num_micro_batches, tile_bytes="8MiB", weight_slots=2,
        schedule="horizontal", check=False,
    )  # fmt: skip
    with open_engine(WIDE_BULK.build(), config) as engine:
        measured = Measured(engine, WIDE_BULK, num_micro_batches, torch.bfloat16)
        plan = engine.plan
    in_slots = num_micro_batches * 2 * 2 * WIDTH * WIDTH * 2
    assert measured.read_bytes == pytest.approx(v_r(True, 1, 1, 2 * num_micro_batches) - in_slots, rel=0.03)
    assert measured.write_bytes == pytest.approx(v_w(True, 1, 1), rel=0.03)
    assert measured.read_bytes == pytest.approx(plan.nvme_read_bytes, rel=0.01)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_spilled_gradients_cross_once_each_way(num_micro_batches: int, nvme: Path) -> None:
    """gamma = 1: each finished gradient is written once and read once whatever A is, and counted as spilled."""
    config = settings(nvme, num_micro_batches=num_micro_batches, tile_bytes="8MiB", check=False)
    placement = Placement.from_config(Config.from_any(config)).override("layers.*", grads="nvme")
    with open_engine(WIDE_BULK.build(), config, placement=placement) as engine:
        measured = Measured(engine, WIDE_BULK, num_micro_batches, torch.bfloat16)
        plan = engine.plan
    assert measured.read_bytes == pytest.approx(v_r(True, 0, 0, 2, gamma=1), rel=0.03)
    assert measured.write_bytes == pytest.approx(v_w(True, 0, 0, gamma=1), rel=0.03)
    assert measured.spill_bytes == measured.write_bytes
    assert measured.read_bytes == pytest.approx(plan.nvme_read_bytes, rel=0.03)
    assert measured.write_bytes == pytest.approx(plan.nvme_write_bytes, rel=0.03)


@pytest.mark.parametrize("cpu_share", [0.25, 0.5])
def test_resident_tiles_save_exactly_their_share(cpu_share: float, nvme: Path) -> None:
    """sigma: reads and writes fall by the share of the tiles that stays in RAM."""
    config = settings(nvme, tile_bytes="20KiB", check=False)  # eight tiles a layer
    shares = {"cpu": cpu_share, "nvme": 1 - cpu_share}
    placement = Placement.from_config(Config.from_any(config)).override("layers.*", optim=shares)
    with open_engine(WIDE_BULK.build(), config, placement=placement) as engine:
        measured = Measured(engine, WIDE_BULK, 1, torch.bfloat16)
    assert measured.read_bytes == pytest.approx(v_r(True, 1 - cpu_share, 0, 2), rel=0.03)
    assert measured.write_bytes == pytest.approx(v_w(True, 1 - cpu_share, 0), rel=0.03)


@pytest.mark.parametrize("num_micro_batches", [1, 4])
def test_preset_moves_what_its_plan_says(num_micro_batches: int, nvme: Path) -> None:
    """Item 4: a built-in decoder, norms and embedding included: plan and engine agree within 3 %."""
    config = settings(nvme, optim="nvme", params="nvme", num_micro_batches=num_micro_batches, tile_bytes="8MiB", check=False)
    with open_engine(GPT_1M.build(), config) as engine:
        measured = Measured(engine, GPT_1M, num_micro_batches, torch.bfloat16)
        plan = engine.plan
    assert measured.read_bytes == pytest.approx(plan.nvme_read_bytes, rel=0.03)
    assert measured.write_bytes == pytest.approx(plan.nvme_write_bytes, rel=0.03)
    num_visits = PRESET.num_layers + 2
    assert 0 < measured.unit_loads <= 2 * num_visits


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=5, n_head=4, n_positions=32))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, decoder_start_token_id=0, pad_token_id=0
        )
    )


class _Labelled(nn.Module):
    """Calls a transformers model with labels, so that it returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("make", [llama, gpt2, t5], ids=lambda make: make.__name__)
def test_unit_loads_are_two_a_visit_at_most(make: object, num_micro_batches: int, nvme: Path) -> None:
    """Item 4: loads of a vertical step are at most twice the unit visits of one micro-batch, whatever A is.

    The visits are counted by calls of the units' modules in plain torch.
    """
    pytest.importorskip("transformers")
    kit = Kit("hf", lambda: _Labelled(make()), lambda generator, step: (torch.randint(97, (1, 12), generator=generator),))  # type: ignore[operator]
    config = settings(
        nvme, optim="nvme", params="nvme", bf16=False, num_micro_batches=num_micro_batches, weight_slots=2, check=False
    )
    model = kit.build()
    with open_engine(model, config) as engine:
        unit_names = [name for name, module in model.named_modules() if "forward" in vars(module)]
        results = [engine.train_batch(kit.batches(step, num_micro_batches)) for step in range(4)]
    visits = 0

    def count(*_: object) -> None:
        nonlocal visits
        visits += 1

    plain = kit.build()
    for name in unit_names:
        plain.get_submodule(name).register_forward_pre_hook(count)
    plain(*kit.batches(0, 1)[0])
    assert visits >= 5
    for result in results[1:]:
        assert 0 < result.unit_loads <= 2 * visits


def test_tied_and_repeated_units_stay_within_two_loads_a_visit(nvme: Path) -> None:
    """Tied weights count once for each group of visits: the embedding's for its own visit and for the head's."""
    config = settings(nvme, optim="nvme", params="nvme", num_micro_batches=4, weight_slots=2)
    run = train(TINY_GPT, config, num_steps=4)
    num_visits = 2 + 2  # embedding, two blocks, head
    assert all(0 < result.unit_loads <= 2 * num_visits for result in run.results[1:])
