"""A checkpoint is not loaded between the micro-batches of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import TINY_GPT, open_engine, settings

from infinity.errors import IllegalTransition


def test_loading_inside_a_step_is_refused(nvme: Path, tmp_path: Path) -> None:
    """Gradients of the old weights would be added to those of the new ones; after the step loading is fine."""
    with open_engine(TINY_GPT.build(), settings(nvme, num_micro_batches=2, schedule="horizontal")) as engine:
        path = engine.save_checkpoint(tmp_path)
        first, second = TINY_GPT.batches(0, 2)
        engine.backward(engine(*first))
        with pytest.raises(IllegalTransition, match="1 of 2 backward passes into a step"):
            engine.load_checkpoint(path)
        engine.backward(engine(*second))
        engine.step()
        engine.load_checkpoint(path)
        assert engine.global_steps == 0
