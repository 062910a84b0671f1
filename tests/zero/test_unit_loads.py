"""How often weights cross the slow tiers: at most twice per visit of one micro-batch, for any number of micro-batches."""

import pytest
import torch
from harness import ABSENT, Harness, TinyModel, require_same, token_loss
from transformers_cases import build_model, language_loss

from infinity.handles import Ready
from infinity.memory.arena import open_arena
from infinity.memory.ledger import Ledger
from infinity.memory.transfer import open_transfers
from infinity.states import Tier
from infinity.zero.gather import Copy
from infinity.zero.vertical import VerticalSchedule
from infinity.zero.weights import Slot, Weights


class Loaded:
    """A load that is over."""

    written = Ready(None)

    def wait(self):
        return

    def done(self):
        return True


class Slotted(Harness):
    """The harness with real weight slots; what is loaded comes from the plain tensors."""

    def __init__(self, model, num_slots):
        super().__init__(model, residency=ABSENT)
        plain = self.weights.values
        size = max(shard.layout.unit_weight_bytes for shard in self.shards)
        roots = [shard.index for shard in self.shards if not shard.group.units]
        arena = open_arena((num_slots + len(roots)) * size, ledger=Ledger({}), tier=Tier.CPU, owner="t", pin=False)
        buffers = [arena.buffer.part(n * size, size) for n in range(num_slots + len(roots))]
        slots = [Slot(buffer, buffer.tensor(torch.uint8, size)) for buffer in buffers]

        def load(shard, buffer, fetch):
            views = self.shards[shard].views(buffer.tensor(torch.uint8, size))
            for name, value in plain[shard].items():
                views[name].copy_(value)
            return Loaded()

        kept = dict(zip(roots, slots[num_slots:], strict=True))
        for shard, slot in kept.items():
            load(shard, slot.host, False)
        transfers = open_transfers(torch.device("cpu"))
        weights = Weights(self.shards, slots[:num_slots], kept, {}, load, Copy(transfers), transfers, self.recorder)
        self.walk._weights = weights
        for runtime in self.walk._units:
            object.__setattr__(runtime, "weights", weights)
        self.weights = weights
        self.vertical = VerticalSchedule(self.walk, weights, self.order, self.recorder, torch.device("cpu"))

    def loads_of_a_step(self, forward_loss, num_micro_batches):
        before = self.recorder.counters().get("unit_loads", 0)
        result = self.step(forward_loss, num_micro_batches)
        self.weights.rewind()
        return self.recorder.counters()["unit_loads"] - before, result


@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_loads_of_the_small_model(num_slots, tied):
    """Loads do not grow with the number of micro-batches, and the gradients are those of weights that never move."""
    torch.manual_seed(0)
    harness = Slotted(TinyModel(num_blocks=5, tied=tied), num_slots)
    torch.manual_seed(0)
    plain = Harness(TinyModel(num_blocks=5, tied=tied))
    for num in (1, 2, 8):
        harness.step(token_loss(num), num)
        plain.step(token_loss(num), num)
        loads, (losses, gradients) = harness.loads_of_a_step(token_loss(num), num)
        expected_losses, expected = plain.step(token_loss(num), num)
        assert loads <= 2 * 7
        assert losses == expected_losses
        require_same(gradients, expected)


@pytest.mark.parametrize(("name", "num_visits"), [("llama", 5), ("gpt2", 6), ("t5", 7)])
def test_loads_of_transformers_models(name, num_visits):
    """Twice the number of unit visits of one micro-batch is the most for Llama, GPT-2 and T5, for any A."""
    harness = Slotted(build_model(name), 3)
    harness.step(language_loss(1), 1)
    for num in (1, 4):
        loads, _ = harness.loads_of_a_step(language_loss(num), num)
        assert loads <= 2 * num_visits
