"""Conformance checks of several engines in one process, of no_sync, of groups and of one batch cut into micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conformance import LR, Twins
from conformance_backward import Tower, TwoHeads, seeded, vectors
from kit import OddMlp, kit_of

import infinity
from infinity import utils
from infinity.errors import IllegalTransition


def two_engines(nvme: str, **job: Any) -> None:
    """Two models train in one process, first in turn, then by one loss through both, each as plain torch trains it."""
    with Twins(seeded(Tower), nvme, **job) as one, Twins(seeded(TwoHeads), nvme, **job) as other:
        for step in range(2):
            for twins in (one, other):
                own, everybodys = twins.batches(vectors, step)
                for side, batches in ((twins.engine, own), (twins.plain, everybodys)):
                    for x, _ in batches:
                        loss = total(side(x))
                        loss.backward() if side is twins.engine else (loss / twins.num_in_step).backward()
                twins.require_same_gradients()
                twins.step()
        own, everybodys = one.batches(vectors, 2)
        for x, _ in own:
            (total(one.engine(x)) * total(other.engine(x))).backward()
        for x, _ in everybodys:
            (total(one.plain(x)) * total(other.plain(x)) / one.num_in_step).backward()
        for twins in (one, other):
            twins.require_same_gradients()
            twins.step()
            twins.require_same_states()


def total(output: Any) -> torch.Tensor:
    """Return a loss of what Tower or TwoHeads gives."""
    return output["left"] + output["right"] if isinstance(output, dict) else output.square().mean()


def held_back(nvme: str, **job: Any) -> None:
    """Two micro-batches inside no_sync and one outside are one step over their sum.

    Where each micro-batch would be summed over ranks by itself, no_sync says what to set.
    """
    with Twins(seeded(Tower), nvme, **job) as twins:
        if twins.engine.world_size > 1 and job.get("stage", 3) > 1:
            with pytest.raises(IllegalTransition, match="gradient_reduction"):
                twins.engine.no_sync()
    with Twins(seeded(Tower), nvme, gradient_reduction="boundary", **job) as twins:
        for step in range(2):
            own, everybodys = twins.batches(vectors, step, 3)
            with twins.engine.no_sync():
                for x, gradient in own[:2]:
                    twins.engine.backward((twins.engine(x) * gradient).mean())
            x, gradient = own[2]
            twins.engine.backward((twins.engine(x) * gradient).mean())
            for x, gradient in everybodys:
                ((twins.plain(x) * gradient).mean() / twins.num_in_step).backward()
            twins.require_same_gradients()
            twins.step()
        twins.require_same_states()


def splits_of_one_batch(nvme: str, **job: Any) -> None:
    """C67: 8 samples a rank as 1, 2, 4 and 8 micro-batches: the same norm to 1e-6, the same gradients and masters."""
    found = []
    for num_micro_batches in (1, 2, 4, 8):
        with Twins(seeded(Tower), nvme, num_micro_batches=num_micro_batches, **job) as twins:
            norms = []
            for step in range(2):
                generator = torch.Generator().manual_seed(10 * step + twins.engine.global_rank)
                x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 5, generator=generator)
                for part, wanted in zip(x.chunk(num_micro_batches), y.chunk(num_micro_batches), strict=True):
                    twins.engine.backward((twins.engine(part) - wanted).square().mean())
                gradients = [utils.safe_get_full_grad(parameter) for parameter in twins.engine.module.parameters()]
                twins.engine.step()
                norms.append(twins.engine.get_global_grad_norm() or 0.0)
            found.append((norms, gradients, twins.masters()))
    reference_norms, reference_gradients, reference = found[0]
    for norms, gradients, masters in found[1:]:
        assert all(math.isclose(norm, expected, rel_tol=1e-6) for norm, expected in zip(norms, reference_norms, strict=True))
        for ours, theirs in zip(gradients, reference_gradients, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        for name, value in reference.items():
            torch.testing.assert_close(masters[name], value, rtol=1e-5, atol=LR * 1e-2)


def groups_without_parameters(nvme: str, **job: Any) -> None:
    """A group that is empty and one of a single element train; ranks that own nothing of it take the same steps."""
    model = seeded(OddMlp)()
    rest = [parameter for name, parameter in model.named_parameters() if name != "temperature"]
    groups = [{"params": rest}, {"params": []}, {"params": [model.temperature], "lr": 10 * LR, "weight_decay": 0.0}]
    config = Twins(seeded(OddMlp), nvme, **job)
    config.engine.close()
    plain = seeded(OddMlp)()
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter for name, parameter in plain.named_parameters() if name != "temperature"]},
            {"params": [plain.temperature], "lr": 10 * LR, "weight_decay": 0.0},
        ],
        lr=LR, weight_decay=0.1, foreach=False,
    )  # fmt: skip
    with infinity.initialize(
        model=model, model_parameters=groups, config=config.config, activation_bytes=1 << 20
    ).engine as engine:
        for step in range(2):
            batches = kit_of("odd-mlp").batches(step, engine.world_size)
            engine.backward(engine(*batches[engine.global_rank]))
            engine.step()
            for batch in batches:
                (plain(*batch) / engine.world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in engine.module.named_parameters():
            master = utils.safe_get_full_fp32_param(parameter)
            assert master is not None
            torch.testing.assert_close(master, plain.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)
        assert [group["lr"] for group in engine.optimizer.param_groups] == [LR, LR, 10 * LR]
