"""Conformance checks of modules whose parameters have several dtypes: each keeps its own, in every tier."""

from __future__ import annotations

import torch
from conformance import Twins, require_close
from conformance_backward import seeded
from kit import TINY_GPT
from torch import nn
from torch.nn import functional as F

from infinity import utils

VOCABULARY, WIDTH, RANK = 257, 32, 4


class MixedBlock(nn.Module):
    """A frozen bf16 layer with an fp32 norm before it and fp32 adapters beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16).requires_grad_(False)
        self.lora_a = nn.Linear(WIDTH, RANK, bias=False)
        self.lora_b = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x.float())
        return x + F.gelu(self.layer(h.bfloat16()) + self.lora_b(self.lora_a(h)).bfloat16())


class MixedGpt(nn.Module):
    """A bf16 embedding that is trained and tied to the head, mixed blocks, an fp32 norm at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(MixedBlock() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x.float()).bfloat16())
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def mixed_dtypes(nvme: str, **job: object) -> dict[str, torch.Tensor]:
    """Train three steps: gradients are torch's to bf16, masters move as torch's do; return all states to be compared."""
    build = seeded(MixedGpt)
    with Twins(build, nvme, bf16=True, num_micro_batches=2, **job) as twins:
        assert any("several dtypes" in note for note in twins.engine.notes)
        for step in range(3):
            own, everybodys = twins.batches(TINY_GPT.batches, step)
            for batch in own:
                twins.engine.backward(twins.engine(*batch))
            for batch in everybodys:
                (twins.plain(*batch) / twins.num_in_step).backward()
            if step == 0:
                twins.require_same_gradients(rtol=0.05, atol=2e-4)
            twins.step()
        states: dict[str, torch.Tensor] = {}
        for name, parameter in twins.plain.named_parameters():
            ours = twins.engine.module.get_parameter(name)
            assert ours.dtype == parameter.dtype
            master = utils.safe_get_full_fp32_param(ours)
            require_close(master, parameter.detach().float(), name, 0.02, 3e-3)
            assert master is not None
            states[name] = master
            for state in ("exp_avg", "exp_avg_sq"):
                value = utils.safe_get_full_optimizer_state(ours, state)
                assert (value is not None) == parameter.requires_grad
                if value is not None:
                    states[f"{name} {state}"] = value
        return states
