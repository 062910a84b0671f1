"""The built-in decoder: sizes, initialisation, and what it computes."""

from __future__ import annotations

import pytest
import torch

from infinity.errors import ConfigError
from infinity.models.gpt import GPT, build_meta_gpt, parameter_initializer, rotary_tables
from infinity.models.presets import PRESETS, GPTConfig, activation_bytes, block_kept_bytes, parameter_count, preset

TINY = GPTConfig(num_layers=2, width=32, num_heads=2, hidden=64)


def named_size(name: str) -> float:
    number, unit = name.removeprefix("gpt-")[:-1], name[-1]
    return float(number) * {"m": 1e6, "b": 1e9}[unit]


def filled(config: GPTConfig, seed: int, dtype: torch.dtype = torch.float32) -> GPT:
    model = build_meta_gpt(config, dtype).to_empty(device="cpu")
    parameter_initializer(config, seed)(model, "")
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_size_in_its_name(name: str) -> None:
    """Every preset's real parameter count equals the formula and lies within 5 % of its name."""
    model = build_meta_gpt(preset(name), torch.bfloat16)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == parameter_count(preset(name))
    assert abs(counted / named_size(name) - 1) <= 0.05
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())


def test_an_unknown_preset_names_the_nearest() -> None:
    """A mistyped preset is a ConfigError with the offending value and the one probably meant."""
    with pytest.raises(ConfigError, match=r"'gpt-25M' is no preset.*Did you mean gpt-25m"):
        preset("gpt-25M")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initialisation_does_not_depend_on_order_or_unit(dtype: torch.dtype) -> None:
    """Filling leaf modules in reverse order gives the bits of filling the whole model at once."""
    whole = filled(TINY, 3, dtype)
    parts = build_meta_gpt(TINY, dtype).to_empty(device="cpu")
    init = parameter_initializer(TINY, 3)
    for name, module in reversed(list(parts.named_modules())):
        if not list(module.children()):
            init(module, name)
    for (name, left), right in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(left, right), name


def test_initial_values_follow_seed_and_name() -> None:
    """Another seed, another layer: other values; the residual outputs have the smaller spread; norms are one."""
    first, second = filled(TINY, 0), filled(TINY, 1)
    assert not torch.equal(first.head.weight, second.head.weight)
    assert not torch.equal(first.blocks[0].mlp.down.weight, first.blocks[1].mlp.down.weight)
    assert first.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 2, rel=0.1)
    assert first.blocks[0].mlp.gate_up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(first.norm.weight, torch.ones(32))


def test_logits_do_not_see_the_future() -> None:
    """Changing the last token leaves every earlier logit as it was and changes the last."""
    model = filled(TINY, 0)
    tokens = torch.arange(12).view(1, 12)
    changed = tokens.clone()
    changed[0, -1] = 200
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_positions_matter_and_the_loss_is_the_mean_cross_entropy() -> None:
    """Swapping two earlier tokens changes the last logits; the loss is fp32 and starts near ln 256."""
    model = filled(TINY, 0)
    tokens = torch.tensor([[5, 9, 7, 1]])
    assert not torch.allclose(model(tokens)[0, -1], model(tokens[:, [1, 0, 2, 3]])[0, -1])
    half = filled(TINY, 0, torch.bfloat16)
    loss = half(tokens, tokens)
    assert loss.dtype == torch.float32
    log_probabilities = half(tokens).float().log_softmax(-1)
    expected = -log_probabilities[0, torch.arange(4), tokens[0]].mean()
    torch.testing.assert_close(loss, expected)
    assert loss.item() == pytest.approx(5.545, abs=0.3)


def autograd_bytes(block: torch.nn.Module, *inputs: torch.Tensor) -> int:
    """Return the bytes of the storages that a forward keeps for its backward, without the weights and rotary tables."""
    outside = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), *inputs[1:])}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(*inputs)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("micro_batch_size", "seq_len"), [(1, 64), (2, 256)])
def test_kept_bytes_are_what_autograd_keeps(dtype: torch.dtype, micro_batch_size: int, seq_len: int) -> None:
    """The planner's figure for a block that is not rerun is within 3 % of what autograd really keeps."""
    config = GPTConfig(num_layers=1, width=128, num_heads=2, hidden=320)
    model = filled(config, 0, dtype)
    x = torch.randn(micro_batch_size, seq_len, 128).to(dtype).requires_grad_()
    measured = autograd_bytes(model.blocks[0], x, *rotary_tables(seq_len, config.head_dim, 1e4, x))
    predicted = block_kept_bytes(config, micro_batch_size=micro_batch_size, seq_len=seq_len, dtype_bytes=dtype.itemsize)
    assert predicted == pytest.approx(measured, rel=0.03)


def test_activations_grow_with_micro_batches_by_their_kept_inputs() -> None:
    """Each micro-batch more under way costs the inputs of all units and nothing else."""
    sizes = [activation_bytes(TINY, micro_batch_size=2, seq_len=8, num_micro_batches=a, dtype_bytes=2) for a in (1, 2, 3)]
    assert sizes[1] - sizes[0] == sizes[2] - sizes[1] == 2 * 8 * 32 * 2 * (2 + 2)
