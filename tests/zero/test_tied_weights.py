"""Weights that several units hold: one group, both contributions, one publication."""

import torch
from harness import ABSENT, Harness, TinyModel, same_in_every_way, token_loss
from torch import nn


def test_tied_embedding_gets_both_contributions():
    """An embedding tied to the head has the gradient of torch, in every schedule (C72)."""
    torch.manual_seed(0)
    same_in_every_way(TinyModel(tied=True), token_loss(3), 3, against_torch=1e-5)


def test_tied_embedding_in_bf16():
    """The two uses are summed apart in fp32 and then added, whatever the schedule."""
    torch.manual_seed(0)
    same_in_every_way(TinyModel(tied=True).bfloat16(), token_loss(3), 3, against_torch=2e-2)


def test_tied_group_is_published_once():
    """The shared group is final after the last of its units only, and is handed on once a step."""
    torch.manual_seed(0)
    harness = Harness(TinyModel(tied=True), residency=ABSENT)
    harness.step(token_loss(2), 2)
    assert sorted(harness.target.published) == ["blocks.0", "blocks.1", "blocks.2", "root", "tied:embed.weight"]
    assert harness.target.published[-2:] == ["tied:embed.weight", "root"]


class AlsoBetweenUnits(nn.Module):
    """A vector that a unit holds and that is used between units too."""

    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
        self.shift = self.blocks[0].bias

    def forward(self, x, y):
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.shift
        return nn.functional.mse_loss(x, y)


def _vectors(num):
    generator = torch.Generator().manual_seed(2)
    pairs = torch.randn(num, 2, 3, 16, generator=generator)
    return lambda model, k: model(*pairs[k])


def test_parameter_shared_with_the_stretches_between_units():
    """A parameter that is used inside a unit and between units belongs to the root group and gets every contribution."""
    torch.manual_seed(0)
    same_in_every_way(AlsoBetweenUnits(), _vectors(3), 3, against_torch=1e-5)


class SharingBlock(nn.Module):
    """A linear map of its own, then one that all blocks share."""

    def __init__(self, shared):
        super().__init__()
        self.own, self.shared = nn.Linear(16, 16), shared

    def forward(self, x):
        return self.shared(torch.tanh(self.own(x)))


class SharingModel(nn.Module):
    """Blocks with a part in common; the part is registered first where `early`, so that it is a unit inside units."""

    def __init__(self, early):
        super().__init__()
        shared = nn.Linear(16, 16)
        if early:
            self.shared = shared
        self.blocks = nn.ModuleList(SharingBlock(shared) for _ in range(3))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(x, y)


def test_units_that_share_a_part_need_two_groups():
    """A unit's own parameters and the shared ones are two groups; the shared part gets every contribution."""
    torch.manual_seed(0)
    harness = Harness(SharingModel(early=False))
    shared = [shard.index for shard in harness.shards if shard.layout.name.startswith("tied:")]
    assert len(shared) == 1
    assert all(len(unit.groups) == 2 and shared[0] in unit.groups for unit in harness.units)
    same_in_every_way(SharingModel(early=False), _vectors(3), 3, against_torch=1e-5)


def test_a_unit_may_be_a_part_of_other_units():
    """A module that is a unit by itself and a part of others is run by whichever of them is called."""
    torch.manual_seed(0)
    assert Harness(SharingModel(early=True)).units[0].name == "shared"
    same_in_every_way(SharingModel(early=True), _vectors(3), 3, against_torch=1e-5)
