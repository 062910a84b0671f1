"""Unmodified models of transformers train in vertical order with the gradients of ordinary accumulation."""

import copy

import pytest
import torch
from harness import ABSENT, KEPT, Harness, require_close, require_same, torch_step
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 96


def _llama(tied=False):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def _gpt2():
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=3, n_head=4, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _t5():
    config = T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _bert():
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def _mixtral():
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return MixtralForCausalLM(config)


# The model, how many of its units are visited, and whether every parameter is used once per micro-batch.
MODELS = {
    "llama": (_llama, 5, True),
    "llama tied": (lambda: _llama(tied=True), 5, False),
    "gpt2": (_gpt2, 6, False),
    "t5": (_t5, 7, False),
    "bert": (_bert, 8, False),
    "mixtral": (_mixtral, 4, True),
}


def _build(name):
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def _loss(num, mask=False):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCAB, (num, 2, 12), generator=generator)
    attention = torch.ones_like(tokens)
    if mask:
        attention[:, 1, 8:] = 0

    def forward_loss(model, k):
        return model(input_ids=tokens[k], attention_mask=attention[k], labels=tokens[k]).loss

    return forward_loss


@pytest.mark.parametrize("mask", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_ordinary_accumulation(name, mask):
    """Bit for bit where each parameter is used once per micro-batch, to rounding where it is used more often."""
    model, forward_loss = _build(name), _loss(3, mask)
    losses, expected = torch_step(copy.deepcopy(model), forward_loss, 3)
    harness = Harness(model, residency=ABSENT)
    for _ in range(2):
        own, gradients = harness.step(forward_loss, 3)
        assert own == losses
        if MODELS[name][2]:
            require_same(gradients, expected)
        else:
            require_close(gradients, expected, 1e-5)
    assert not harness.recorder.counters()["tails_not_separable"]
    assert "arrivals_without_yield" not in harness.recorder.counters()


@pytest.mark.parametrize("name", MODELS)
def test_schedule_and_residency_change_no_bit(name):
    """Vertical and horizontal order, absent and kept weights: the same bits."""
    forward_loss = _loss(3)
    expected = Harness(_build(name), residency=ABSENT).step(forward_loss, 3)
    for residency in (ABSENT, KEPT):
        for schedule in ("vertical", "horizontal"):
            losses, gradients = Harness(_build(name), residency=residency).step(forward_loss, 3, schedule=schedule)
            assert losses == expected[0]
            require_same(gradients, expected[1], where=(residency, schedule))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "bert"])
def test_units_are_asked_for_twice_whatever_the_number_of_micro_batches(name):
    """Each visit of a unit is served once in forward and once in backward."""
    harness = Harness(_build(name), residency=ABSENT)
    counts = []
    for num in (1, 4):
        harness.step(_loss(num), num)
        harness.weights.acquired.clear()
        harness.step(_loss(num), num)
        counts.append(len(harness.visits()))
    num_visits = len([unit for unit in harness.units if unit.groups])
    assert counts[0] == counts[1]
    assert counts[1] <= 2 * (num_visits + 1)


def test_hidden_states_can_be_asked_for():
    """What transformers collects from its layers on request is each micro-batch's own."""
    forward_loss = _loss(3)

    def with_hidden(model, k):
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(2, VOCAB, (3, 2, 12), generator=generator)
        output = model(input_ids=tokens[k], labels=tokens[k], output_hidden_states=True)
        return output.loss + 0.01 * sum(hidden.square().mean() for hidden in output.hidden_states)

    model = _build("llama")
    losses, expected = torch_step(copy.deepcopy(model), with_hidden, 3)
    own, gradients = Harness(model).step(with_hidden, 3)
    torch.testing.assert_close(own, losses)
    require_close(gradients, expected, 1e-5)
    assert own != Harness(_build("llama")).step(forward_loss, 3)[0]
