"""Unmodified transformers models through the engine: settings that are turned off are said, and put back at the end."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import infinity


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip


def _config(nvme: Path) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": str(nvme)},
            "offload_param": {"device": "nvme", "nvme_path": str(nvme)},
        },
    }


def _batches() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(1, 64, (3, 2, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": part, "labels": part} for part in tokens]


def test_key_value_caches_are_turned_off_and_said(tmp_path: Path) -> None:
    """A Llama with its default use_cache=True trains as torch trains it; the engine notes what it changed and undoes it."""
    model, plain = _llama(), _llama()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    with infinity.initialize(model=model, config=_config(tmp_path)).engine as engine:
        assert any("use_cache" in note for note in engine.notes)
        assert model.config.use_cache is False
        for _ in range(2):
            result = engine.train_batch(_batches())
            losses = []
            for batch in _batches():
                loss = plain(**batch).loss
                (loss / 3).backward()
                losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
            torch.testing.assert_close(list(result.losses), losses, rtol=1e-5, atol=0)
    assert model.config.use_cache is True


def test_gradient_checkpointing_of_the_model_is_turned_off_and_said(tmp_path: Path) -> None:
    """Units run again anyway: the model's own checkpointing around them is off while the engine has the model."""
    model = _llama()
    model.gradient_checkpointing_enable()
    with infinity.initialize(model=model, config=_config(tmp_path)).engine as engine:
        assert any("Gradient checkpointing" in note for note in engine.notes)
        assert engine.train_batch(_batches()).loss == pytest.approx(float(_llama()(**_batches()[0]).loss.detach()), rel=0.2)
    assert model.model.layers[0].gradient_checkpointing is True


def test_configurations_of_parts_count_too(tmp_path: Path) -> None:
    """T5's decoder has a configuration of its own, which caches by default."""
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    before = [model.config.use_cache, model.encoder.config.use_cache, model.decoder.config.use_cache]
    with infinity.initialize(model=model, config=_config(tmp_path)).engine as engine:
        assert engine.train_batch(_batches()).loss > 0
        assert not any([model.config.use_cache, model.encoder.config.use_cache, model.decoder.config.use_cache])
    assert [model.config.use_cache, model.encoder.config.use_cache, model.decoder.config.use_cache] == before


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    """A plain module has no such settings and no such notes."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    with infinity.initialize(model=model, config=_config(tmp_path)).engine as engine:
        assert not [note for note in engine.notes if "use_cache" in note or "heckpointing" in note]
