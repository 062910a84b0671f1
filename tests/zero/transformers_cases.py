"""Small models of transformers, dropout off, for comparison with ordinary accumulation."""

import torch
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


def build_model(name):
    """Return a fresh model in training mode; the same weights each time."""
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def language_loss(num, mask=False):
    """Return forward_loss over `num` micro-batches of tokens that are their own labels; `mask` pads some."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCAB, (num, 2, 12), generator=generator)
    attention = torch.ones_like(tokens)
    if mask:
        attention[:, 1, 8:] = 0

    def forward_loss(model, k):
        return model(input_ids=tokens[k], attention_mask=attention[k], labels=tokens[k]).loss

    return forward_loss
