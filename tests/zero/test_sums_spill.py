"""Sums that outlast a micro-batch leave memory and come back: what, when, and that no bit changes with it."""

import copy

import pytest
import torch
from harness import ABSENT, KEPT, RESIDENT, Block, Collected, Harness, TinyModel, require_same, token_loss, vector_loss
from torch import nn

from infinity.errors import IllegalTransition
from infinity.store.layout import ParameterSpec, shard_layout
from infinity.store.unit_size import undivided
from infinity.zero.gradients import FinalRun, GradientSums
from infinity.zero.lasting_sums import lasting_sums
from infinity.zero.micro_batch import Visit
from infinity.zero.shard import Residency, Shard
from infinity.zero.units import ParameterGroup

FIRST, SECOND, THIRD = Visit(0, 0), Visit(0, 1), Visit(0, 2)


class Disk:
    """A place with memory for one shard: all others are on a disk, and what is lent is spoilt when it is taken back."""

    def __init__(self, shards, target):
        self.shards = shards
        self.target = target
        self.stored = {}
        self.lent = {}
        self.reads, self.writes = [], []

    def at(self, shard, number, *, fresh):
        if any(other != shard for other, _ in self.lent):
            self._take_back()
        key = (shard, number)
        if key not in self.lent:
            num_elements = self.shards[shard].layout.num_state_elements
            self.lent[key] = torch.full((num_elements,), float("nan")) if fresh else self.stored.pop(key)
            if not fresh:
                self.reads.append(key)
        return self.lent[key]

    def leave(self, shard):
        if any(one == shard for one, _ in self.lent):
            self._take_back()

    def publish(self, shard, total, touched):
        self.target.publish(shard, [FinalRun(0, total)], touched)
        self.lent.clear()

    def discard(self):
        self.lent.clear()
        self.stored.clear()

    def _take_back(self):
        for key, lent in self.lent.items():
            self.stored[key] = lent.clone()
            lent.fill_(float("nan"))
            self.writes.append(key)
        self.lent.clear()


def harness_with_disk(model, **options):
    harness = Harness(model, **options)
    harness.sums = harness.walk.sums
    harness.sums._place = Disk(harness.shards, harness.target)
    return harness, harness.sums._place


class Recurrent(nn.Module):
    """Two blocks, called in turn for several rounds."""

    def __init__(self, num_rounds=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.num_rounds = num_rounds

    def forward(self, x):
        for _ in range(self.num_rounds):
            for block in self.blocks:
                x = block(x)
        return x


MODELS = {
    "plain": (lambda: TinyModel(scaled=False), token_loss),
    "tied": (lambda: TinyModel(tied=True), token_loss),
    "root-everywhere-dropout": (lambda: TinyModel(scaled=True, dropout=0.1, between=0.1), token_loss),
    "called-three-times": (Recurrent, vector_loss),
}


@pytest.mark.parametrize("residency", [ABSENT, KEPT, RESIDENT], ids=lambda one: one.value)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_sums_that_spill_have_the_bits_of_those_that_stay(name, dtype, residency):
    """Spilled, in memory, and in vertical order: tied, repeated and root parameters have the same gradients."""
    torch.manual_seed(0)
    make, loss_of = MODELS[name]
    model, forward_loss = make(), loss_of(3)
    if dtype is torch.bfloat16 and loss_of is token_loss:
        model = model.to(dtype)
    vertical, staying = (Harness(copy.deepcopy(model), residency=residency) for _ in range(2))
    spilled, disk = harness_with_disk(copy.deepcopy(model), residency=residency)
    for _ in range(2):
        expected = vertical.step(forward_loss, 3)
        for harness in (staying, spilled):
            losses, gradients = harness.step(forward_loss, 3, schedule="horizontal")
            assert losses == expected[0]
            require_same(gradients, expected[1])
    assert disk.writes
    assert disk.reads


def test_each_sum_crosses_between_two_micro_batches():
    """A - 1 times out and back; that of a tied parameter which is complete first once more, until they are added up."""
    torch.manual_seed(0)
    harness, disk = harness_with_disk(TinyModel(tied=True, scaled=False), residency=ABSENT)
    harness.step(token_loss(4), 4, schedule="horizontal")
    names = {shard.index: shard.layout.name for shard in harness.shards}
    crossings = {}
    for shard, number in disk.writes:
        crossings[names[shard], number] = crossings.get((names[shard], number), 0) + 1
    assert sorted(disk.reads) == sorted(disk.writes)
    assert crossings == {
        **{(f"blocks.{block}", 0): 3 for block in range(3)},
        ("tied:embed.weight", 0): 4,  # the head's: backward comes there first
        ("tied:embed.weight", 1): 3,
        ("root", 0): 4,  # behind the last block: all others come after it
    }


def test_memory_holds_one_shard_at_a_time():
    """While backward runs, and between micro-batches, no more than one shard's sums are lent; nothing else keeps any."""
    torch.manual_seed(0)
    harness, disk = harness_with_disk(TinyModel(scaled=False), residency=ABSENT)
    forward_loss, seen = token_loss(3), []

    def watched(model, k):
        seen.append((dict(disk.lent), [len(state.sums) for state in harness.sums._states]))
        return forward_loss(model, k)

    harness.step(watched, 3, schedule="horizontal")
    assert [len(lent) for lent, _ in seen] == [0, 0, 0]  # the first unit's were written when its call was over
    assert all(not any(counts) for _, counts in seen)
    assert len(disk.stored) == len(disk.lent) == 0


def test_one_micro_batch_spills_nothing():
    """Its gradients are final at once; vertical order has nothing to wait for either."""
    torch.manual_seed(0)
    harness, disk = harness_with_disk(TinyModel(), residency=ABSENT)
    harness.step(token_loss(1), 1, schedule="horizontal")
    harness.step(token_loss(3), 3, schedule="vertical")
    assert (disk.writes, disk.reads) == ([], [])


def test_a_step_that_failed_leaves_nothing():
    """After an error in the second micro-batch the next step has the bits of one that nothing went before."""
    torch.manual_seed(0)
    model = TinyModel(tied=True)
    forward_loss = token_loss(3)
    fresh, _ = harness_with_disk(copy.deepcopy(model), residency=ABSENT)
    harness, disk = harness_with_disk(copy.deepcopy(model), residency=ABSENT)

    def failing(model, k):
        if k == 1:
            raise ZeroDivisionError
        return forward_loss(model, k)

    with pytest.raises(ZeroDivisionError):
        harness.step(failing, 3, schedule="horizontal")
    assert (disk.lent, disk.stored) == ({}, {})
    _, gradients = harness.step(forward_loss, 3, schedule="horizontal")
    require_same(gradients, fresh.step(forward_loss, 3, schedule="horizontal")[1])


# One shard's sums by themselves


class Arrays:
    """All arrays in memory; garbage until they are written."""

    def __init__(self):
        self.flats, self.published = {}, []

    def at(self, shard, number, *, fresh):
        return self.flats.setdefault((shard, number), torch.full((192,), float("nan")))

    def leave(self, shard):
        return

    def publish(self, shard, total, touched):
        self.published.append((shard, total.clone(), touched))

    def discard(self):
        self.flats.clear()


def layout_of_three():
    specs = [ParameterSpec(name, (3,), "float32", True) for name in ("a", "b", "c")]
    return shard_layout(0, "unit0", specs, tile_elements=64)


def test_the_first_gradient_keeps_its_sign_of_zero():
    """It is copied: 0 + -0 would be 0, which Adam's moments tell apart from -0."""
    place = Arrays()
    sums = lasting_sums(layout_of_three(), place)
    for _ in range(2):
        sums.add("b", FIRST, torch.tensor([-0.0, 0.0, 1.0]))
    sums.finish()
    total = place.published[0][1]
    assert torch.signbit(total[64:67]).tolist() == [True, False, False]
    assert not torch.signbit(total[:64]).any()  # nobody touched a: it is zero, whatever was in memory


def test_visits_come_in_any_order_and_are_added_in_their_own():
    """Backward brings the last visit first: (1e8 - 1e8) + 1 keeps the one, and what only one visit touched is its own."""
    place = Arrays()
    sums = lasting_sums(layout_of_three(), place)
    sums.add("a", THIRD, torch.full((3,), 1.0))
    sums.add("c", THIRD, torch.full((3,), 5.0))
    sums.add("a", SECOND, torch.full((3,), -1e8))
    sums.add("b", SECOND, torch.full((3,), 7.0))
    sums.add("a", FIRST, torch.full((3,), 1e8))
    sums.finish()
    (shard, total, touched), *others = place.published
    assert (shard, touched, others) == (0, {"a", "b", "c"}, [])
    assert [total[start : start + 3].tolist() for start in (0, 64, 128)] == [[1.0] * 3, [7.0] * 3, [5.0] * 3]
    assert total.count_nonzero() == 9  # padding


def test_bf16_gradients_add_up_in_fp32_in_their_place():
    """256 + 1 + ... is exact in fp32; summed in bf16 the ones would be lost."""
    place = Arrays()
    sums = lasting_sums(layout_of_three(), place)
    for value in (256.0, *[1.0] * 8):
        sums.add("a", FIRST, torch.full((3,), value, dtype=torch.bfloat16))
    sums.finish()
    assert place.published[0][1][:3].tolist() == [264.0] * 3


def test_a_gradient_after_the_end_is_an_error_here_too():
    """It would be lost without a word."""
    layout = layout_of_three()
    shard = Shard(ParameterGroup(0, "unit0", (), (0,)), undivided(layout), Residency.ABSENT, {})
    sums = GradientSums([shard], Collected([shard]), Arrays())
    sums.outlast_micro_batches()
    sums.expect([0])
    sums.add(0, "a", FIRST, torch.ones(3))
    sums.open()
    sums.complete([0])
    with pytest.raises(IllegalTransition, match="after unit0 was final"):
        sums.add(0, "a", FIRST, torch.ones(3))
