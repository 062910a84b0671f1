"""What the sections mean together: the batch triple, the optimizer's defaults, directories, gradients."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infinity.config import BatchSizes, Config, resolve_batch
from infinity.config.optimizer import PARAMS_OF_TYPE
from infinity.errors import ConfigError

sizes = st.integers(1, 64)


@given(
    micro=sizes,
    accumulation=sizes,
    world=st.integers(1, 8),
    missing=st.sampled_from(["train", "micro", "accumulation", "none"]),
)
def test_any_two_of_the_triple_give_the_third(micro: int, accumulation: int, world: int, missing: str) -> None:
    """The triple is completed from any two of its members."""
    train = micro * accumulation * world
    given_values = {"train": train, "micro": micro, "accumulation": accumulation} | {missing: None}
    resolved = resolve_batch(given_values["train"], given_values["micro"], given_values["accumulation"], world_size=world)
    assert resolved == BatchSizes(train, micro, accumulation, world)


def test_missing_members_of_the_triple_default_to_one() -> None:
    """Only a total gives accumulation 1; nothing at all gives one sample per rank."""
    assert resolve_batch(8, None, None, world_size=2) == BatchSizes(8, 4, 1, 2)
    assert resolve_batch(None, None, 3, world_size=2) == BatchSizes(6, 1, 3, 2)
    assert Config.from_any({}).batch(1) == BatchSizes(1, 1, 1, 1)


def test_contradicting_triple_shows_the_arithmetic() -> None:
    """A contradiction and a remainder are errors with the numbers in them."""
    with pytest.raises(ConfigError, match=r"train_batch_size is 16, but .* = 2 x 4 x 1 = 8"):
        resolve_batch(16, 2, 4, world_size=1)
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps = .* = 10 / \(4 x 1\) = 2.5 is not a whole number"):
        resolve_batch(10, 4, None, world_size=1)
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu = .* = 2 / \(1 x 4\) = 0.5"):
        resolve_batch(2, None, None, world_size=4)


def test_optimizer_defaults_are_torchs() -> None:
    """C56: names and defaults of every type that torch.optim has, read from the signatures of its classes."""
    for name in set(PARAMS_OF_TYPE) - {"Lion"}:
        theirs = {
            key: parameter.default for key, parameter in inspect.signature(getattr(torch.optim, name)).parameters.items()
        }
        ours = Config.from_any({"optimizer": {"type": name.lower()}}).optimizer.values()
        assert ours == {key: theirs[key] for key in ours}
        left_out = theirs.keys() - ours.keys() - {"params", "foreach", "maximize", "capturable", "differentiable", "fused"}
        assert left_out <= {"amsgrad", "decoupled_weight_decay"}
    adamw, adam = Config.from_any({}), Config.from_any({"optimizer": {"type": "adam"}})
    assert (adamw.optimizer.type, adamw.optimizer.params.weight_decay, adamw.optimizer.decoupled) == ("AdamW", 0.01, True)
    assert (adam.optimizer.type, adam.optimizer.params.weight_decay) == ("Adam", 0.0)
    assert (adamw.optimizer.params.lr, adamw.optimizer.params.betas, adamw.optimizer.params.eps) == (
        1e-3,
        (0.9, 0.999),
        1e-8,
    )


def test_only_adam_goes_to_nvme(tmp_path: Path) -> None:
    """C66: an optimizer of torch beside a state that is offloaded to NVMe is refused, naming what works on every tier."""
    for section in ("offload_optimizer", "offload_param"):
        zero = {"stage": 3, section: {"device": "nvme", "nvme_path": str(tmp_path)}}
        with pytest.raises(
            ConfigError, match=f"{section}.device is nvme, but optimizer.type Lion .* Adam and AdamW work on"
        ):
            Config.from_any({"optimizer": {"type": "lion"}, "zero_optimization": zero})


def test_adam_says_which_weight_decay_it_means() -> None:
    """Type Adam with weight decay is DeepSpeed's AdamW and says so; adam_w_mode false is L2 (C55)."""
    values = {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}}
    config = Config.from_any(values)
    assert config.optimizer.decoupled
    assert any("adam_w_mode" in note for note in config.notes())
    l2 = Config.from_any({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}})
    assert not l2.optimizer.decoupled
    assert not l2.notes()


def test_a_directory_that_is_given_twice_is_used_once_and_said() -> None:
    """The very same path twice in infinity.nvme is a note; in infinity.nvme and an nvme_path it is as usual."""
    config = Config.from_any({"infinity": {"nvme": ["/a", "/b", "/a"]}})
    assert config.nvme_directories == (Path("/a"), Path("/b"))
    assert "infinity.nvme: /a is given 2 times and used once." in config.notes()
    paths = {"device": "nvme", "nvme_path": "/a"}
    usual = {"infinity": {"nvme": "/a"}, "zero_optimization": {"offload_optimizer": paths, "offload_param": paths}}
    assert Config.from_any(usual).notes() == ()


def test_directories_are_collected_once_from_sections_that_use_them() -> None:
    """Directories come from infinity.nvme and from offload sections that may use NVMe; an idle nvme_path is noted."""
    config = Config.from_any(
        {
            "infinity": {"nvme": "/a"},
            "zero_optimization": {
                "offload_optimizer": {"device": "nvme", "nvme_path": ["/b", "/a"]},
                "offload_param": {"device": "cpu", "nvme_path": "/c"},
            },
        }
    )
    assert config.nvme_directories == (Path("/a"), Path("/b"))
    assert any(note.startswith("zero_optimization.offload_param.nvme_path: has no effect") for note in config.notes())
    assert any("striped" in note for note in config.notes())


def test_gradient_dtype_follows_the_precision_unless_it_is_set() -> None:
    """bf16 and fp16 runs round gradients to the dtype of their weights, fp32 runs keep fp32; either key is honoured."""
    assert Config.from_any({}).grad_dtype == "fp32"
    assert Config.from_any({"bf16.enabled": True}).grad_dtype == "bf16"
    assert Config.from_any({"fp16.enabled": True}).grad_dtype == "fp16"
    assert Config.from_any({"fp16.enabled": True, "data_types.grad_accum_dtype": "fp32"}).grad_dtype == "fp32"
    assert Config.from_any({"bf16.enabled": True, "infinity.grad_dtype": "fp32"}).grad_dtype == "fp32"
    assert Config.from_any({"bf16.enabled": True, "data_types.grad_accum_dtype": "fp32"}).grad_dtype == "fp32"


def test_keys_of_a_loss_scale_without_effect_are_noted() -> None:
    """What fp16 says of its scale has an effect in fp16 runs only, and of a static scale nothing else has."""
    keys = {"fp16.loss_scale": 128, "fp16.hysteresis": 4}
    assert Config.from_any(keys).notes() == tuple(f"{key}: has no effect because fp16 is off." for key in keys)
    static = Config.from_any({"fp16.enabled": True, **keys})
    assert static.notes() == ("fp16.hysteresis: has no effect because fp16.loss_scale is static.",)
    assert Config.from_any({"fp16.enabled": True, "fp16.loss_scale": 0, "fp16.hysteresis": 4}).notes() == ()
    assert [Config.from_any(values).precision for values in ({}, {"bf16.enabled": True}, {"fp16.enabled": True})] == [
        "fp32", "bf16", "fp16",
    ]  # fmt: skip


def test_whole_floats_are_counts() -> None:
    """JSON's 5e8 is accepted where a whole number is meant."""
    assert Config.from_any({"train_batch_size": 1e1}).train_batch_size == 10
    assert Config.from_any({"infinity.cpu_memory": 1.5e9}).infinity.cpu_memory == 1_500_000_000
