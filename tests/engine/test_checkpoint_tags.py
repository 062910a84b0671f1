"""Checkpoints by tag: where they go, which one a load without a tag takes, and the client's state with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import TINY_GPT, open_engine, require_same_state, settings

from infinity.errors import CheckpointError


def test_a_tag_names_a_checkpoint(nvme: Path, tmp_path: Path) -> None:
    """Two tags and one save without: each loads by name with its client state; without a name the one saved last does."""
    directory = tmp_path / "checkpoints"
    with open_engine(TINY_GPT.build(), settings(nvme)) as engine:
        states, paths = {}, {}
        for step, tag in enumerate(("first", "second")):
            engine.train_batch(TINY_GPT.batches(step, 1, torch.bfloat16))
            paths[tag] = engine.save_checkpoint(directory, tag, {"epoch": step})
            states[tag] = engine.state_dict()
        assert (directory / "latest").read_text() == "second"
        assert paths["first"].parent == directory / "first"
        assert engine.load_checkpoint(directory, "first") == (paths["first"], {"epoch": 0})
        require_same_state(engine.state_dict(), states["first"])
        assert engine.global_steps == 1
        assert engine.load_checkpoint(str(directory)) == (paths["second"], {"epoch": 1})
        require_same_state(engine.state_dict(), states["second"])
        untagged = engine.save_checkpoint(directory)
        assert untagged.parent == directory
        assert engine.load_checkpoint(directory) == (untagged, {})


def test_wrong_tags_are_refused(nvme: Path, tmp_path: Path) -> None:
    """A path, an empty name, or one that nobody has saved: an error that names it, and nothing is written."""
    with open_engine(TINY_GPT.build(), settings(nvme)) as engine:
        for tag in ("", "a/b", "..", "latest", "/abs"):
            with pytest.raises(CheckpointError, match="no name of a directory"):
                engine.save_checkpoint(tmp_path / "checkpoints", tag)
        assert not (tmp_path / "checkpoints").exists()
        with pytest.raises(CheckpointError, match="unknown"):
            engine.load_checkpoint(tmp_path / "checkpoints", "unknown")
