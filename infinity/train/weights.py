"""The trained weights of a built-in model as safetensors: the fp32 master values, one parameter at a time."""

from __future__ import annotations

from pathlib import Path

import torch

from infinity.checkpoint.export import export_safetensors
from infinity.checkpoint.specs import TensorSpec
from infinity.models.gpt import build_meta_gpt
from infinity.models.presets import GPTConfig
from infinity.train.contract import TrainingEngine


def give_weights(engine: TrainingEngine) -> None:
    """Take the part in `save_weights` of a rank that does not write."""
    for _ in engine.full_parameters():
        pass


def save_weights(engine: TrainingEngine, gpt: GPTConfig, directory: Path) -> Path:
    """Write `<directory>/model.safetensors` and return its path; an earlier one is replaced only by a whole one.

    Weights too large for one file are split, and the path is that of their index. Peak memory is the largest parameter.
    Raises SwapSpaceError, StorageError.
    """
    shapes = build_meta_gpt(gpt, torch.float32).named_parameters()
    specs = [TensorSpec(name, "float32", tuple(shape.shape)) for name, shape in shapes]
    pieces = ((name, 0, tensor.detach().cpu().contiguous()) for name, tensor in engine.full_parameters())
    return export_safetensors(directory, specs, pieces, aliases={}, metadata={})[-1]
