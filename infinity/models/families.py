"""Shapes of transformers decoders from their config.json, for the families whose layers are known here; no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from infinity.errors import ConfigError
from infinity.models.presets import GPTConfig
from infinity.models.shapes import ROOT, ModelShape, Shapes, UnitShape, repeated

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class _Values:
    """The values of one config.json; `source` is its path."""

    source: Path
    given: Mapping[str, object]

    def count(self, key: str, default: int | None = None) -> int:
        value = self.given.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(
                f"--model {self.source}: {key} is {value!r}, not a whole number of at least 1.",
                remedy="Correct the file, or give --parameters instead.",
            )
        return value

    def switch(self, key: str, default: bool) -> bool:
        return bool(self.given.get(key, default))


@dataclass(frozen=True, slots=True)
class _Family:
    """How a family's decoder is built, and which heads and biases it has where its config does not say."""

    build: Callable[[_Values, _Family], ModelShape]
    num_key_value_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: width / heads
    has_qkv_bias: bool = False
    has_head_norms: bool = False


def config_shape(path: Path) -> ModelShape:
    """Return the shape of the causal language model that a config.json, or the directory that holds it, describes.

    Raises ConfigError where there is none, where it cannot be read, and for a family that is not known here.
    """
    file = path / _CONFIG if path.is_dir() else path
    values = _Values(file, _read(file))
    model_type = values.given.get("model_type")
    family = _FAMILIES.get(str(model_type))
    if family is None:
        raise ConfigError(
            f"--model {file}: the number of parameters of model_type {model_type!r} cannot be computed here.",
            remedy=f"Give it with --parameters. Known: {', '.join(_FAMILIES)}.",
        )
    return family.build(values, family)


def _read(file: Path) -> Mapping[str, object]:
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(
            f"--model {file}: cannot be read as a model's configuration: {error}.",
            remedy="Give a directory with a config.json of transformers, a preset, or --parameters.",
        ) from None
    if not isinstance(given, dict):
        raise ConfigError(f"--model {file}: holds {type(given).__name__}, not an object.", remedy="Give --parameters.")
    return given


def _llama(values: _Values, family: _Family) -> ModelShape:
    """RMSNorm, grouped-query attention, SwiGLU."""
    width, num_heads = values.count("hidden_size"), values.count("num_attention_heads")
    hidden, vocabulary = values.count("intermediate_size"), values.count("vocab_size")
    head_dim = values.count("head_dim", family.head_dim or width // num_heads)
    query, group = num_heads * head_dim, values.count("num_key_value_heads", family.num_key_value_heads or num_heads)
    key = group * head_dim
    is_biased, is_mlp_biased = values.switch("attention_bias", False), values.switch("mlp_bias", False)
    block = (
        *_linear("self_attn.q_proj", width, query, bias=family.has_qkv_bias or is_biased),
        *_linear("self_attn.k_proj", width, key, bias=family.has_qkv_bias or is_biased),
        *_linear("self_attn.v_proj", width, key, bias=family.has_qkv_bias or is_biased),
        *_linear("self_attn.o_proj", query, width, bias=is_biased),
        *((("self_attn.q_norm.weight", (head_dim,)), ("self_attn.k_norm.weight", (head_dim,))) * family.has_head_norms),
        *_linear("mlp.gate_proj", width, hidden, bias=is_mlp_biased),
        *_linear("mlp.up_proj", width, hidden, bias=is_mlp_biased),
        *_linear("mlp.down_proj", hidden, width, bias=is_mlp_biased),
        ("input_layernorm.weight", (width,)),
        ("post_attention_layernorm.weight", (width,)),
    )
    decoder = GPTConfig(values.count("num_hidden_layers"), width, num_heads, hidden, vocabulary)
    ends = _Ends("model.embed_tokens", "lm_head", is_tied=values.switch("tie_word_embeddings", False))
    return _decoder(values, decoder, "model.layers", block, ends, (("model.norm.weight", (width,)),))


def _gpt2(values: _Values, _: _Family) -> ModelShape:
    """LayerNorm with bias, learnt positions, a head that is the embedding."""
    width, vocabulary = values.count("n_embd"), values.count("vocab_size")
    hidden = values.count("n_inner", 4 * width)
    block = (
        *_norm("ln_1", width),
        *_linear("attn.c_attn", width, 3 * width, bias=True),
        *_linear("attn.c_proj", width, width, bias=True),
        *_norm("ln_2", width),
        *_linear("mlp.c_fc", width, hidden, bias=True),
        *_linear("mlp.c_proj", hidden, width, bias=True),
    )
    decoder = GPTConfig(values.count("n_layer"), width, values.count("n_head"), hidden, vocabulary)
    ends = _Ends("transformer.wte", "lm_head", is_tied=values.switch("tie_word_embeddings", True))
    positions = UnitShape("transformer.wpe", (("transformer.wpe.weight", (values.count("n_positions", 1024), width)),))
    return _decoder(values, decoder, "transformer.h", block, ends, _norm("transformer.ln_f", width), (positions,))


def _gpt_neox(values: _Values, _: _Family) -> ModelShape:
    """LayerNorm with bias, rotary positions, a head of its own."""
    width, vocabulary = values.count("hidden_size"), values.count("vocab_size")
    hidden, is_biased = values.count("intermediate_size"), values.switch("attention_bias", True)
    block = (
        *_norm("input_layernorm", width),
        *_norm("post_attention_layernorm", width),
        *_linear("attention.query_key_value", width, 3 * width, bias=is_biased),
        *_linear("attention.dense", width, width, bias=is_biased),
        *_linear("mlp.dense_h_to_4h", width, hidden, bias=True),
        *_linear("mlp.dense_4h_to_h", hidden, width, bias=True),
    )
    decoder = GPTConfig(values.count("num_hidden_layers"), width, values.count("num_attention_heads"), hidden, vocabulary)
    ends = _Ends("gpt_neox.embed_in", "lm_head", is_tied=values.switch("tie_word_embeddings", False))
    return _decoder(values, decoder, "gpt_neox.layers", block, ends, _norm("gpt_neox.final_layer_norm", width))


@dataclass(frozen=True, slots=True)
class _Ends:
    """The names of embedding and head, and whether they are one matrix."""

    embedding: str
    head: str
    is_tied: bool


def _decoder(
    values: _Values,
    decoder: GPTConfig,
    prefix: str,
    block: Shapes,
    ends: _Ends,
    root: Shapes,
    after_embedding: tuple[UnitShape, ...] = (),
) -> ModelShape:
    def units() -> Iterator[UnitShape]:
        table = (decoder.vocab_size, decoder.width)
        name = f"tied:{ends.embedding}.weight" if ends.is_tied else ends.embedding
        yield UnitShape(name, ((f"{ends.embedding}.weight", table),), visits=2 if ends.is_tied else 1)
        yield from after_embedding
        yield from repeated(prefix, decoder.num_layers, block)
        if not ends.is_tied:
            yield UnitShape(ends.head, ((f"{ends.head}.weight", table),))
        yield UnitShape(ROOT, root)

    note = "Activations are estimated as those of the built-in decoder of these sizes."
    return ModelShape(str(values.source), tuple(units()), decoder, note)


def _linear(name: str, inputs: int, outputs: int, *, bias: bool) -> Shapes:
    weight: Shapes = ((f"{name}.weight", (outputs, inputs)),)
    return (*weight, (f"{name}.bias", (outputs,))) if bias else weight


def _norm(name: str, width: int) -> Shapes:
    return (f"{name}.weight", (width,)), (f"{name}.bias", (width,))


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(_llama),
    "mistral": _Family(_llama, num_key_value_heads=8),
    "qwen2": _Family(_llama, has_qkv_bias=True),
    "qwen3": _Family(_llama, head_dim=128, has_head_norms=True),
    "gpt2": _Family(_gpt2),
    "gpt_neox": _Family(_gpt_neox),
}
