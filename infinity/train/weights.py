"""The trained weights as one safetensors file: the fp32 master values, streamed one parameter at a time."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from infinity.checkpoint.export import SINGLE
from infinity.checkpoint.failures import storage_errors
from infinity.checkpoint.sources import host_bytes
from infinity.checkpoint.specs import TensorSpec
from infinity.checkpoint.stream import open_stream_writer
from infinity.models.gpt import build_meta_gpt
from infinity.models.presets import GPTConfig
from infinity.train.contract import TrainingEngine


def save_weights(engine: TrainingEngine, gpt: GPTConfig, directory: Path) -> Path:
    """Write `<directory>/model.safetensors` and return its path; an earlier one is replaced only by a whole one.

    Peak memory is the largest parameter. Raises SwapSpaceError, StorageError.
    """
    shapes = build_meta_gpt(gpt, torch.float32).named_parameters()
    specs = {name: TensorSpec(name, "float32", tuple(shape.shape)) for name, shape in shapes}
    path = directory / SINGLE
    partial = directory / f"{SINGLE}.partial-{os.getpid()}"
    with storage_errors("Writing", path):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with open_stream_writer(partial, tuple(specs.values()), {"format": "pt"}) as writer:
                for name, tensor in engine.full_parameters():
                    writer.write(name, 0, host_bytes(specs[name], tensor.detach().cpu().contiguous()))
                writer.finish()
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    return path
