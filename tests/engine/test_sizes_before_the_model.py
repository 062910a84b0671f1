"""What `infinity plan` computes from names and shapes is what the engine computes from the model itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from infinity.byte_sizes import GIB
from infinity.config import Config
from infinity.engine.cut import cut
from infinity.errors import ConfigError
from infinity.models.families import config_shape
from infinity.models.gpt import build_meta_gpt
from infinity.models.presets import PRESETS, block_kept_bytes, parameter_count
from infinity.models.shapes import ModelShape, counted_shape, preset_shape
from infinity.placement import Placement, Schedule, UnitSize
from infinity.placement.stages import PARTITIONED
from infinity.train.outlook import Question, sizes_of

SMALL = {"hidden_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 160, "vocab_size": 301}
SMALL_GPT2 = {"n_embd": 96, "n_head": 4, "n_layer": 2, "vocab_size": 301, "n_positions": 50}


def one_group(_: nn.Parameter) -> int:
    """Every parameter is in the optimizer's first group."""
    return 0


def question(shape: ModelShape, precision: str = "bf16", num_ranks: int = 1) -> Question:
    return Question(
        shape=shape, precision=precision, num_ranks=num_ranks, stages=(0,), placement=Placement(), micro_batch_size=2,
        num_micro_batches=2, seq_len=64, schedule=Schedule.VERTICAL, has_gpu=False, gpu_memory_bytes=None,
        cpu_memory_bytes=GIB, nvme_bytes=None,
    )  # fmt: skip


def without_kept(sizes: Sequence[UnitSize]) -> list[tuple[object, ...]]:
    return [
        (
            u.weight_bytes,
            u.gathered_weight_bytes,
            u.num_state_elements,
            u.num_waiting_elements,
            u.tile_bytes,
            u.visits,
            u.is_root,
        )
        for u in sizes
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("preset", ["gpt-1m", "gpt-400m"])
def test_a_preset_has_the_sizes_of_its_model(preset: str, precision: str) -> None:
    """Names, bytes, elements, tiles, kept activations and order: the planner gets the very same units (C43)."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    kept = block_kept_bytes(PRESETS[preset], micro_batch_size=2, seq_len=64, dtype_bytes=dtype.itemsize)
    pieces = cut(
        build_meta_gpt(PRESETS[preset], dtype), Config.from_any({"bf16": {"enabled": precision == "bf16"}}), one_group
    )
    expected = pieces.sizes(lambda unit: kept if unit.startswith("blocks.") else 0)
    for stage in PARTITIONED:  # one rank has everything in every stage
        assert sizes_of(question(preset_shape(preset), precision), stage) == expected
    assert pieces.buffer_bytes() == 0


@pytest.mark.parametrize(("model_type", "values"), [
    ("llama", {**SMALL, "num_key_value_heads": 2}),
    ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {**SMALL, "num_key_value_heads": 4, "head_dim": 32}),
    ("qwen2", {**SMALL, "num_key_value_heads": 2}),
    ("qwen3", {**SMALL, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("gpt2", SMALL_GPT2),
    ("gpt2", {**SMALL_GPT2, "n_inner": 200}),
    ("gpt_neox", SMALL),
])  # fmt: skip
def test_a_known_family_has_the_sizes_of_its_model(model_type: str, values: dict[str, object], tmp_path: Path) -> None:
    """Every known family of transformers: parameters, units, tied embeddings, all from config.json alone."""
    config = AutoConfig.for_model(model_type, **values)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    shape = config_shape(tmp_path)
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    expected = cut(model, Config.from_any({"bf16": {"enabled": True}}), one_group).sizes()
    assert without_kept(sizes_of(question(shape), 0)) == without_kept(expected)
    names = {name for unit in shape.units for name, _ in unit.parameters}
    assert names == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(("content", "named"), [
    ('{"model_type": "unheard_of"}', "'unheard_of'"),
    ('{"model_type": "llama"}', "hidden_size is None"),
    ('{"model_type": "gpt2", "n_embd": "wide"}', "n_embd is 'wide'"),
    ("[]", "list"),
    ("{", "cannot be read"),
    (None, "cannot be read"),
])  # fmt: skip
def test_what_cannot_be_counted_is_said(content: str | None, named: str, tmp_path: Path) -> None:
    """An unknown family, a wrong or missing value, no file: the error names it and says what else can be given."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=named) as caught:
        config_shape(tmp_path)
    assert "--parameters" in caught.value.remedy


@pytest.mark.parametrize("num_parameters", [1_000_003, 7_000_000_000, 7_500_000_000])
def test_a_bare_number_is_cut_like_the_nearest_preset(num_parameters: int) -> None:
    """The total is exact, the blocks are equal but for one, and the nearest preset is named."""
    shape = counted_shape(num_parameters)
    assert shape.num_parameters == num_parameters
    nearest = min(PRESETS, key=lambda name: abs(parameter_count(PRESETS[name]) - num_parameters))
    assert nearest in shape.note
    assert len(shape.units) == len(preset_shape(nearest).units)
    blocks = [unit.num_parameters for unit in shape.units if unit.is_block]
    assert len(set(blocks)) <= 2
    with pytest.raises(ConfigError, match="too small"):
        counted_shape(10)


def test_each_state_falls_with_the_ranks_from_its_stage_on() -> None:
    """On four ranks what is updated is a quarter from stage 1; from 3 on units gather weights for every use."""
    whole = sizes_of(question(preset_shape("gpt-25m")), 0)
    for stage, owned in enumerate([1, 4, 4, 4]):
        part = sizes_of(question(preset_shape("gpt-25m"), num_ranks=4), stage)
        for one, all_ in zip(part, whole, strict=True):
            padding = 64 if owned == 4 else 4 * 64
            assert 0 <= one.num_state_elements - all_.num_state_elements / owned <= padding
            assert 0 <= one.num_waiting_elements - all_.num_waiting_elements / owned <= padding
            assert 0 <= one.weight_bytes - all_.weight_bytes / owned <= 4096 + 2 * padding
            assert one.is_split == (owned == 4)
            assert one.gathers_weights == (stage == 3 and not one.is_root)
            assert 0 <= one.num_gradient_elements - all_.num_gradient_elements <= 4 * 64
