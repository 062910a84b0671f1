"""Every wrong configuration gets a sentence that names the key, the value and what would be right."""

from __future__ import annotations

import pytest

from infinity.config import Config, Layer
from infinity.config.config import SCHEMA
from infinity.errors import ConfigError


def problem(values: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.from_any(values)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"zero_optimization": {"offload_optimiser": {}}},
            "zero_optimization.offload_optimiser: unknown key; did you mean offload_optimizer?",
        ),
        ({"gradient_cliping": 1}, "gradient_cliping: unknown key; did you mean gradient_clipping?"),
        ({"offload_param": {"device": "cpu"}}, "offload_param: unknown key; did you mean zero_optimization.offload_param?"),
        ({"aio": {"thread_count": 1}}, "aio.thread_count: unknown key; did you mean aio.queue_depth?"),
        ({"optimizer": {"params": {"max_grad_norm": 1}}}, "did you mean gradient_clipping?"),
        ({"zero_optimization": {"stage3_prefetch_bucket_sise": 1}}, "did you mean stage3_prefetch_bucket_size?"),
        ({"optimizer.params.lr.x": 1}, "optimizer.params.lr.x: unknown key; optimizer.params.lr has a value and no keys."),
        (
            {"tensorboard": {"enabled": True, "output_pth": "x"}},
            "tensorboard.output_pth: unknown key; did you mean output_path?",
        ),
        ({"zzz": 1}, "zzz: unknown key; the top level has"),
    ],
)
def test_unknown_key_names_the_nearest(values: object, sentence: str) -> None:
    """An unknown key is an error with its full path and the nearest known key (C135)."""
    assert sentence in problem(values)


@pytest.mark.parametrize("section", sorted({"", *SCHEMA.sections}))
def test_unknown_key_is_an_error_in_every_section(section: str) -> None:
    """No section ignores a key that it does not know (C135)."""
    path = f"{section}.nonsense_key" if section else "nonsense_key"
    assert f"{path}: unknown key" in problem({path: 1})


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"bf16": {"enabled": "true"}}, "bf16.enabled: 'true' should be a valid boolean"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled: 1 should be a valid boolean"),
        ({"train_batch_size": 2.5}, "train_batch_size: 2.5 should be a valid integer"),
        ({"train_batch_size": True}, "train_batch_size: True should be a valid integer"),
        ({"train_batch_size": 0}, "train_batch_size: 0 should be greater than or equal to 1"),
        ({"seed": "x"}, "seed: 'x' should be a valid integer"),
        ({"seed": 1 << 63}, f"seed: {1 << 63} should be less than or equal to {(1 << 63) - 1}"),
        ({"optimizer": {"params": {"lr": -1.0}}}, "optimizer.params.lr: -1.0 should be greater than or equal to 0"),
        ({"optimizer": {"params": {"lr": float("nan")}}}, "optimizer.params.lr: nan should be"),
        ({"optimizer": {"params": {"betas": [0.9, 1.0]}}}, "optimizer.params.betas.1: 1.0 should be less than 1"),
        (
            {"optimizer": {"type": "OneBitAdam"}},
            "OneBitAdam is not supported; write one of Adam, AdamW, SGD, Adagrad, Lion,",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}},
            "type SGD has no parameter betas; it has lr, ",
        ),
        ({"optimizer": {"type": "sgd", "params": {"nesterov": True}}}, "nesterov needs a momentum and no dampening"),
        ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, "type AdamW contradicts adam_w_mode false"),
        (
            {"scheduler": {"params": {"warmup_num_steps": 9, "total_num_steps": 3}}},
            "warmup_num_steps 9 is more than total_num_steps 3",
        ),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 should be 0, 1, 2 or 3"),
        ({"zero_optimization": 3}, "zero_optimization: 3 is not a section of keys"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "no directory is given"),
        (
            {"zero_optimization": {"offload_param": {"device": "disk"}}},
            "'disk' should be 'auto', 'none', 'gpu', 'cpu' or 'nvme'",
        ),
        ({"infinity": {"cpu_memory": "2 foo"}}, "infinity.cpu_memory: '2 foo' should be a size such as 2GiB"),
        ({"infinity": {"cpu_memory": -1}}, "infinity.cpu_memory: -1 should be a size"),
        ({"infinity": {"nvme": [3]}}, "infinity.nvme: [3] should be a directory"),
        ({"infinity": {"tile_slots": 1}}, "infinity.tile_slots: 1 should be greater than or equal to 2"),
        ({"aio": {"block_size": 1000}}, "aio.block_size: 1000 should be a multiple of 4096 bytes"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16.enabled and fp16.enabled are both true"),
        (
            {"fp16": {"initial_scale_power": 4, "min_loss_scale": 32}},
            "min_loss_scale 32 is more than the scale that the run begins with, 2^initial_scale_power = 2^4 = 16",
        ),
        ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale: 0 should be greater than 0"),
        ({"fp16": {"auto_cast": True}}, "fp16.auto_cast: true is not supported"),
        ({"infinity": {"grad_dtype": "bf16"}}, "a bf16 gradient needs bf16.enabled"),
        ({"fp16": {"enabled": True}, "infinity": {"grad_dtype": "bf16"}}, "this is a run in fp16"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}}, "a fp16 gradient needs fp16.enabled"),
        (
            {"bf16": {"enabled": True}, "infinity": {"grad_dtype": "bf16"}, "data_types": {"grad_accum_dtype": "fp32"}},
            "contradicts",
        ),
        ({"amp": {"enabled": True}}, "amp: is not supported"),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights: true is not supported",
        ),
        (
            {"zero_optimization": {"overlap_comm": "yes"}},
            "zero_optimization.overlap_comm: 'yes' should be of type bool or null",
        ),
        (
            {"zero_optimization": {"stage3_x": 1, "sub_group_size": True}},
            "sub_group_size: True should be of type int or float",
        ),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": True}}, "bf16.enabled: given twice"),
        (
            {"zero_optimization": {"stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 2}},
            "zero_optimization.prefetch_bucket_size: given twice, by two of its names, as 1 and as 2",
        ),
        ({"bf16": {"enabled": True}, "train_batch_size": 1, "amp": {"enabled": 1}}, "amp: is not supported"),
        (3, "int is no configuration"),
    ],
)
def test_wrong_value_says_what_would_be_right(values: object, sentence: str) -> None:
    """Wrong types, units, ranges and contradictions name key, value and what is expected (C135)."""
    assert sentence in problem(values)


def test_all_problems_are_listed_at_once() -> None:
    """A configuration with several problems gets one error that lists them all."""
    said = problem({"sead": 1, "bf16": {"enabled": "x"}, "optimizer": {"params": {"eps": "y"}}})
    assert "3 problems" in said
    for key in ("sead", "bf16.enabled", "optimizer.params.eps"):
        assert f"- {key}: " in said


def test_problem_names_the_file_or_flag() -> None:
    """A problem says which of several sources holds the wrong value (C136)."""
    with pytest.raises(ConfigError, match=r"seed: 'x' should be a valid integer \(--seed, which wins over 1 from ds.json\)"):
        Config.from_layers([Layer("ds.json", {"seed": 1}), Layer("--seed", {"seed": "x"})])
