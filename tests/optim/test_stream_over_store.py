"""The stream over the real store and real files: NVMe, RAM and mixed shares end with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from optim_fakes import (
    FakeStore,
    Model,
    make_layouts,
    make_model,
    make_step,
    shares,
    small_buffer,
    weight_slots,
    write_model,
)

from infinity.aio.select import open_engine
from infinity.memory.arena import Buffer
from infinity.memory.ledger import Ledger
from infinity.optim.kernel import open_kernel
from infinity.optim.pipeline import IoPolicy
from infinity.optim.stream import open_update_stream
from infinity.states import Tier
from infinity.store.layout import ShardLayout
from infinity.store.shares import ShardShares
from infinity.store.store import Store, open_store
from infinity.telemetry.recorder import Recorder

NUM_STEPS = 3


def copy_bytes(source: Buffer, target: Buffer, num_bytes: int) -> None:
    target.tensor(torch.uint8, num_bytes).copy_(source.tensor(torch.uint8, num_bytes))


def fill(store: Store, fake: FakeStore, layouts: list[ShardLayout]) -> None:
    """Put what the fake holds into the store."""
    for layout in layouts:
        for tile in layout.tiles:
            lease = store.new_tile(tile)
            copy_bytes(fake.bytes["tile", layout.index, tile.index], lease.buffer, tile.state_bytes)
            store.publish_tile(tile, lease).wait()
        store.publish_weights(layout.index, fake.bytes["weights", layout.index, -1]).wait()
        publish_gradients(store, fake, layout)


def publish_gradients(store: Store, fake: FakeStore, layout: ShardLayout) -> None:
    store.publish_gradients(layout.index, fake.bytes["gradients", layout.index, -1]).wait()


def everything(store: Store, layouts: list[ShardLayout]) -> list[bytes]:
    """Return the weights and the state of every tile as bytes."""
    found = []
    for layout in layouts:
        weights = small_buffer(layout.shard_weight_bytes)
        store.fetch_weights(layout.index, weights).wait()
        found.append(bytes(weights.tensor(torch.uint8, layout.shard_weight_bytes)))
        for tile in layout.tiles:
            lease = store.fetch_tile(tile).wait()
            found.append(bytes(lease.buffer.tensor(torch.uint8, tile.state_bytes)))
            lease.release()
    return found


def train(
    directory: Path, places: list[ShardShares], layouts: list[ShardLayout], model: Model, policy: IoPolicy
) -> list[bytes]:
    """Make three steps and return what is stored then."""
    shards = list(zip(layouts, places, strict=True))
    fake = FakeStore(shards, 1, 2)
    write_model(fake, model)
    fake.close()
    ledger, recorder, engine = Ledger({}), Recorder(), open_engine("threads")
    store = open_store(
        directories=[directory], engine=engine, ledger=ledger, recorder=recorder, run_name="t", pin=False,
        num_tile_slots=2, shards=shards, grad_element_bytes=2,
    )  # fmt: skip
    fill(store, fake, layouts)
    slots = weight_slots(layouts, 2)
    stream = open_update_stream(
        store=store, shards=shards, kernel=open_kernel(), recorder=recorder, ledger=ledger, grad_element_bytes=2,
        lease_weights=lambda shard: slots.lease(), policy=policy,
    )  # fmt: skip
    try:
        for count in range(1, NUM_STEPS + 1):
            stream.begin(make_step(model, dict.fromkeys(model, count), "bfloat16"))
            stream.drain()
        return everything(store, layouts)
    finally:
        stream.close()
        store.close()
        engine.close()


@pytest.mark.parametrize("policy", list(IoPolicy))
def test_real_tiers_agree(tmp_path: Path, policy: IoPolicy) -> None:
    """Three steps on files with two slots, in RAM, and with shares of both."""
    layouts = make_layouts()
    model = make_model(layouts, torch.bfloat16)
    mixed = [ShardShares(Tier.NVME, tier, frozenset({0, 2})) for tier in (Tier.CPU, Tier.NVME, Tier.NVME)]
    in_ram = train(tmp_path, [shares(layout, Tier.CPU) for layout in layouts], layouts, model, policy)
    on_nvme = train(tmp_path, [shares(layout, Tier.NVME) for layout in layouts], layouts, model, policy)
    assert on_nvme == in_ram
    assert train(tmp_path, mixed, layouts, model, policy) == in_ram
