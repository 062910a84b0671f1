"""Backward passes that users begin themselves, on one rank; the checks are those of conformance_backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import conformance_backward as checks
import pytest
import torch
from conformance import Twins
from kit import require_same_state

from infinity.errors import IllegalTransition

TIERS = [("nvme", "nvme"), ("cpu", "cpu")]
CHECKS = [
    checks.two_losses_of_one_forward,
    checks.one_loss_of_two_forwards,
    checks.coalesced_backwards,
    checks.undivided_losses,
    checks.scaled_losses,
    checks.frozen_base,
]


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_users_backward(check: Callable[..., None], tiers: tuple[str, str], nvme: Path) -> None:
    """Every way to begin a backward gives the gradients, masters and moments of plain torch, element by element."""
    check(str(nvme), optim=tiers[0], params=tiers[1])


@pytest.mark.parametrize("tiers", TIERS, ids="-".join)
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["plain", "reentrant"])
def test_backward_of_a_tensor_with_checkpoints_inside_units(use_reentrant: bool, tiers: tuple[str, str], nvme: Path) -> None:
    """C95, C96: tensor.backward(gradient=...), checkpoints in units with a frozen norm, three steps: torch's gradients."""
    checks.tensor_backward(str(nvme), use_reentrant=use_reentrant, optim=tiers[0], params=tiers[1])


def test_a_scaled_loss_in_fp16(nvme: Path) -> None:
    """engine.scale carries the loss scale: bit for bit what engine.backward gives, also outside the module."""
    checks.scaled_losses(str(nvme), fp16={"initial_scale_power": 10})


def test_scaled_and_given_to_backward_is_scaled_once(nvme: Path) -> None:
    """engine.backward(engine.scale(loss)) is engine.backward(loss), whose value comes back divided."""
    states = []
    for scaled in (False, True):
        with Twins(checks.seeded(checks.TwoHeads), nvme, num_micro_batches=2) as twins:
            for x, _ in twins.batches(checks.vectors, 0)[0]:
                loss = twins.engine(x)["left"]
                divided = twins.engine.backward(twins.engine.scale(loss) if scaled else loss)
                assert scaled or torch.equal(divided, loss.detach() / 2)
            twins.engine.step()
            states.append(twins.engine.state_dict())
    require_same_state(states[1], states[0])


def test_a_kept_graph_is_waited_for(nvme: Path) -> None:
    """Masters cannot be set while a kept graph may run backward again; gradients that were read end the step's backwards."""
    with Twins(checks.seeded(checks.TwoHeads), nvme) as twins:
        x, _ = twins.batches(checks.vectors, 0)[0][0]
        losses = twins.engine(x)
        twins.engine.backward(losses["left"], retain_graph=True)
        with pytest.raises(IllegalTransition, match="between a forward and its backward"):
            twins.engine.require_no_graph("set a master")
        twins.engine.finish_gradients()
        with pytest.raises(IllegalTransition, match="after the step's gradients were read"):
            twins.engine.backward(losses["right"])


def test_a_backward_that_failed_leaves_the_users_parameters_in_the_modules(nvme: Path) -> None:
    """After an exception inside a kept unit the modules hold what they held before, and the next step is a clean one."""
    with Twins(checks.seeded(checks.Tower), nvme) as twins:
        engine, block = twins.engine, twins.engine.module.get_submodule("blocks.1")
        held = dict(engine.module.named_parameters())
        (x, gradient), *_ = twins.batches(checks.vectors, 0)[0]
        handle = block.get_submodule("up").register_full_backward_hook(lambda *_: 1 // 0)
        output = engine(x)
        handle.remove()
        with pytest.raises(ZeroDivisionError):
            output.backward(gradient)
        engine.zero_grad()
        assert all(held[name] is parameter for name, parameter in engine.module.named_parameters())
        engine(x).backward(gradient)
        twins.plain(x).backward(gradient)
        twins.require_same_gradients()


def test_misuse_of_coalescing_is_named(nvme: Path) -> None:
    """A step inside, nesting in no_sync, and an empty block: two errors and nothing; after an exception it has ended."""
    with Twins(checks.seeded(checks.Tower), nvme) as twins:
        engine = twins.engine
        x, gradient = twins.batches(checks.vectors, 0)[0][0]
        with engine.coalesce_grad_reduction():
            engine(x).backward(gradient)
            with pytest.raises(IllegalTransition, match="step was called inside"):
                engine.step()
            with pytest.raises(IllegalTransition, match="no_sync was entered inside"), engine.no_sync():
                pass
        engine.step()
        with engine.coalesce_grad_reduction():
            pass
        engine.step()
        assert engine.global_steps == 1
        with pytest.raises(ZeroDivisionError), engine.coalesce_grad_reduction():
            raise ZeroDivisionError
        engine(x).backward(gradient)
        engine.step()
        assert engine.global_steps == 2
