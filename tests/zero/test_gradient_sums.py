"""Sums of gradients: order, precision, when a shard is final, and what is touched."""

import pytest
import torch

from infinity.errors import IllegalTransition
from infinity.store.layout import ParameterSpec, shard_layout
from infinity.store.unit_size import undivided
from infinity.zero.gradients import GradientSums, fill
from infinity.zero.micro_batch import Visit
from infinity.zero.shard import Residency, Shard
from infinity.zero.units import ParameterGroup

FIRST, SECOND = Visit(0, 0), Visit(0, 1)


class Target:
    """Collects what is published."""

    def __init__(self, shards, dtype):
        self.flats = [torch.full((shard.layout.num_state_elements,), 7.0, dtype=dtype) for shard in shards]
        self.published = []

    sums_micro_batches = False

    def settle(self):
        """Nothing is under way."""

    def finish(self):
        """Nothing is under way."""

    def publish(self, shard, runs, touched):
        fill(self.flats[shard], runs)
        self.published.append((shard, set(touched)))


def _sums(dtype=torch.float32, num_shards=1, root=False):
    shards = []
    for index in range(num_shards):
        specs = [ParameterSpec("a", (3,), "float32", True), ParameterSpec("b", (2, 2), "float32", True)]
        units = () if root and index == num_shards - 1 else (index,)
        group = ParameterGroup(index, f"unit{index}", (), units)
        layout = shard_layout(index, f"unit{index}", specs, tile_elements=64)
        shards.append(Shard(group, undivided(layout), Residency.ABSENT, {}))
    target = Target(shards, dtype)
    return GradientSums(shards, target), target


def test_bf16_gradients_add_up_in_fp32():
    """256 + 1 + ... is exact in fp32; summed in bf16 the ones would be lost."""
    sums, target = _sums()
    sums.expect([0])
    for value in (256.0, *[1.0] * 8):
        sums.add(0, "a", FIRST, torch.full((3,), value, dtype=torch.bfloat16))
    sums.finish()
    assert target.flats[0][:3].tolist() == [264.0] * 3


def test_the_one_rounding_is_to_nearest_even():
    """1 + 2^-8 is a tie in bf16 and goes to the even neighbour; 1 + 3 * 2^-8 goes up to the even one."""
    sums, target = _sums(torch.bfloat16)
    sums.add(0, "a", FIRST, torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1.0]))
    sums.finish()
    assert target.flats[0][:3].tolist() == [1.0, 1 + 2**-6, 1.0]


def test_visits_are_summed_apart_and_added_in_their_order():
    """Within a visit micro-batches add up first: (1e8 - 1e8) + (1 + 1) keeps the ones, 1e8 + 1 - 1e8 + 1 would not."""
    sums, target = _sums()
    for first, second in ((1e8, 1.0), (-1e8, 1.0)):
        sums.add(0, "a", SECOND, torch.full((3,), second))
        sums.add(0, "a", FIRST, torch.full((3,), first))
    sums.finish()
    assert target.flats[0][:3].tolist() == [2.0] * 3


def test_a_parameter_without_gradient_is_not_touched():
    """It is not among the touched ones and its elements, like the padding, are zero."""
    sums, target = _sums()
    sums.add(0, "b", FIRST, torch.ones(2, 2))
    sums.finish()
    assert target.published == [(0, {"b"})]
    assert target.flats[0].sum() == 4
    assert (target.flats[0] == 0).sum() == target.flats[0].numel() - 4


def test_a_shard_without_any_gradient_is_not_published():
    """Nothing happens to a unit that nobody used."""
    sums, target = _sums(num_shards=2)
    sums.expect([1])
    sums.add(1, "a", FIRST, torch.ones(3))
    sums.open()
    sums.finish()
    assert [shard for shard, _ in target.published] == [1]


def test_a_shard_is_final_after_its_last_call():
    """With all calls known, the last completed one hands the shard on; before that nothing is handed on."""
    sums, target = _sums(num_shards=2)
    sums.expect([0])
    sums.expect([0])
    sums.expect([1])
    sums.add(0, "a", FIRST, torch.ones(3))
    sums.complete([0])
    sums.open()
    assert target.published == []
    sums.add(0, "a", FIRST, torch.ones(3))
    sums.complete([0])
    assert target.published == [(0, {"a"})]
    sums.finish()
    assert target.published == [(0, {"a"})]


def test_calls_completed_before_all_are_known_wait():
    """A shard whose known calls are complete is final when the schedule says that no more will come."""
    sums, target = _sums()
    sums.expect([0])
    sums.add(0, "a", FIRST, torch.ones(3))
    sums.complete([0])
    assert target.published == []
    sums.open()
    assert target.published == [(0, {"a"})]


def test_the_root_group_is_final_at_the_end():
    """Nobody counts the uses of parameters of no unit."""
    sums, target = _sums(num_shards=2, root=True)
    sums.add(1, "a", Visit(-1, 0, after=True), torch.ones(3))
    sums.open()
    assert target.published == []
    sums.finish()
    assert target.published == [(1, {"a"})]


def test_abandoned_calls_leave_the_count_at_the_end():
    """A call whose backward never came does not keep its shard from being handed on."""
    sums, target = _sums()
    sums.expect([0])
    sums.expect([0])
    sums.add(0, "a", FIRST, torch.ones(3))
    sums.open()
    sums.complete([0])
    assert target.published == []
    sums.finish()
    assert target.published == [(0, {"a"})]


def test_a_gradient_after_the_end_is_an_error():
    """It would be lost without a word."""
    sums, _ = _sums()
    sums.expect([0])
    sums.add(0, "a", FIRST, torch.ones(3))
    sums.open()
    sums.complete([0])
    with pytest.raises(IllegalTransition, match="after unit0 was final"):
        sums.add(0, "a", FIRST, torch.ones(3))


def test_the_first_gradient_is_not_changed():
    """The tensor that autograd gave may be shared with others; adding makes a copy first."""
    sums, _ = _sums()
    first = torch.ones(3)
    sums.add(0, "a", FIRST, first)
    sums.add(0, "a", FIRST, torch.ones(3))
    assert first.tolist() == [1.0] * 3


def test_sparse_gradients_are_made_dense():
    """A sparse embedding's gradient is summed like any other."""
    sums, target = _sums()
    for _ in range(2):
        sums.add(0, "b", FIRST, torch.sparse_coo_tensor([[1]], [[2.0, 3.0]], (2, 2), check_invariants=True))
    sums.finish()
    assert target.flats[0][target.flats[0] != 0].tolist() == [4.0, 6.0]


def test_discard_forgets_a_step():
    """After a failed step nothing of it is left."""
    sums, target = _sums()
    sums.expect([0])
    sums.add(0, "a", FIRST, torch.ones(3))
    sums.discard()
    sums.finish()
    assert target.published == []
