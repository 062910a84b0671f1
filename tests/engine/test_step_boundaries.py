"""Where a step ends in the familiar loop: no_sync, and boundaries that the user sets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import TINY_GPT, open_engine, require_same_state, settings

from infinity.errors import IllegalTransition

TIERS = [("nvme", "nvme"), ("cpu", "cpu")]


def summed(num_micro_batches: int, num_steps: int = 2) -> dict[str, torch.Tensor]:
    """Plain torch over the sums of so many micro-batches."""
    model = TINY_GPT.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, foreach=False)
    for step in range(num_steps):
        for batch in TINY_GPT.batches(step, num_micro_batches):
            model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def require_near(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        if not name.endswith("qkv.bias"):  # a bias of the keys has no gradient but rounding, which Adam makes large
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_gradients_are_summed_inside_no_sync(tiers: tuple[str, str], nvme: Path) -> None:
    """Two micro-batches inside and one outside are one step over the sum of the three, as in torch."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], bf16=False, lr=1e-3)
    with open_engine(TINY_GPT.build(), config) as engine:
        for step in range(2):
            batches = TINY_GPT.batches(step, 3)
            with engine.no_sync():
                for batch in batches[:2]:
                    engine.backward(engine(*batch))
                    assert not engine.is_gradient_accumulation_boundary()
            engine.backward(engine(*batches[2]))
            assert engine.is_gradient_accumulation_boundary()
            engine.step()
            assert engine.global_steps == step + 1
        require_near(engine.state_dict(), summed(3))


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
def test_the_user_may_set_the_boundary(tiers: tuple[str, str], nvme: Path) -> None:
    """False holds the step back beyond the configured count, True takes it, None counts again."""
    config = settings(nvme, optim=tiers[0], params=tiers[1], bf16=False, lr=1e-3)
    with open_engine(TINY_GPT.build(), config) as engine:
        for step in range(2):
            batches = TINY_GPT.batches(step, 3)
            engine.set_gradient_accumulation_boundary(False)
            for batch in batches[:2]:
                engine.backward(engine(*batch))
                engine.step()
                assert engine.global_steps == step
                assert not engine.was_step_applied()
            engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(*batches[2]))
            engine.step()
            assert engine.was_step_applied()
        require_near(engine.state_dict(), summed(3))
        engine.set_gradient_accumulation_boundary(None)
        engine.backward(engine(*TINY_GPT.batches(5, 1)[0]))
        engine.step()
        assert engine.global_steps == 3


def test_a_step_may_end_early(nvme: Path) -> None:
    """One of two micro-batches, and then the boundary: the step is taken, its gradient still divided by two."""
    norms = []
    for num_micro_batches in (1, 2):
        config = settings(nvme, bf16=False, num_micro_batches=num_micro_batches, optim="nvme", params="nvme")
        with open_engine(TINY_GPT.build(), config) as engine:
            engine.backward(engine(*TINY_GPT.batches(0, 1)[0]))
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
            assert engine.global_steps == 1
            norms.append(engine.last_grad_norm)
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-6)  # type: ignore[operator]


def test_misuse_of_no_sync_is_named(nvme: Path) -> None:
    """Nesting and a step inside are errors, and change nothing; after an exception the block has ended."""
    with open_engine(TINY_GPT.build(), settings(nvme)) as engine:
        before = engine.state_dict()
        with engine.no_sync():
            engine.backward(engine(*TINY_GPT.batches(0, 1, torch.bfloat16)[0]))
            with pytest.raises(IllegalTransition, match="inside no_sync"), engine.no_sync():
                pass
            with pytest.raises(IllegalTransition, match="inside no_sync"):
                engine.step()
        engine.zero_grad()
        require_same_state(engine.state_dict(), before)
        with pytest.raises(ZeroDivisionError), engine.no_sync():
            raise ZeroDivisionError
        engine.backward(engine(*TINY_GPT.batches(0, 1, torch.bfloat16)[0]))
        engine.step()
        assert engine.global_steps == 1
