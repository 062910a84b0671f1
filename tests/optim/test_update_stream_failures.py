"""An I/O error reaches everyone who waits, leaves no slot behind, and ends the stream."""

from __future__ import annotations

import pytest
import torch
from optim_fakes import FakeStore, Key, make_layouts, make_model, make_step, shares, weight_slots, write_model

from infinity.errors import IllegalTransition, StorageError
from infinity.memory.ledger import Ledger
from infinity.optim.kernel import open_kernel
from infinity.optim.pipeline import IoPolicy
from infinity.optim.stream import STREAM_MOVES, StreamState, open_update_stream
from infinity.optim.tile_update import UPDATE_MOVES, UpdateState
from infinity.states import Lifecycle, Tier
from infinity.telemetry.recorder import Recorder

FAULTS: dict[str, tuple[str, Key]] = {
    "weights cannot be read": ("read", ("weights", 1, -1)),
    "a tile cannot be read": ("read", ("tile", 1, 1)),
    "a gradient cannot be read": ("read", ("gradients", 1, -1)),
    "a tile cannot be written": ("write", ("tile", 1, 0)),
    "weights cannot be written": ("write", ("weights", 1, -1)),
}


def open_failing(fault: str):  # type: ignore[no-untyped-def]
    layouts = make_layouts()
    shards = [(layout, shares(layout, Tier.NVME)) for layout in layouts]
    store = FakeStore(shards, 3, 2, delay_seconds=0.001, fails=lambda operation, key: (operation, key) == FAULTS[fault])
    model = make_model(layouts, torch.bfloat16)
    write_model(store, model)
    slots, ledger = weight_slots(layouts, 3), Ledger({})

    def open_stream(policy: IoPolicy):  # type: ignore[no-untyped-def]
        return open_update_stream(
            store=store, shards=shards, kernel=open_kernel(num_threads=1), recorder=Recorder(), ledger=ledger,
            grad_element_bytes=2, lease_weights=lambda shard: slots.lease(), policy=policy,
        )  # fmt: skip

    return store, model, slots, ledger, open_stream


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("policy", list(IoPolicy))
def test_the_first_error_reaches_loads_and_drain(fault: str, policy: IoPolicy) -> None:
    """Loads after the failing one fail, `drain` raises the same error, slots come back, further loads are refused."""
    store, model, slots, ledger, open_stream = open_failing(fault)
    stream = open_stream(policy)
    stream.begin(make_step(model, dict.fromkeys(model, 1), "bfloat16"))
    leases = [slots.lease() for _ in range(3)]
    loads = [stream.load(shard, lease.buffer, fetch=True) for shard, lease in enumerate(leases)]
    with pytest.raises(StorageError, match="failed") as drained:
        stream.drain()
    outcomes = []
    for load in loads:
        for handle in (load, load.written):
            try:
                handle.wait()
            except StorageError as error:
                outcomes.append(error)
            assert handle.done()
    assert outcomes
    assert all("failed" in str(error) for error in outcomes)
    with pytest.raises(IllegalTransition, match=str(drained.value).split("(")[0]):
        stream.load(0, leases[0].buffer, fetch=True)
    with pytest.raises(IllegalTransition):
        stream.begin(make_step(model, {}, "bfloat16"))
    stream.close()
    stream.close()
    store.close()
    for lease in leases:
        lease.release()
    slots.close()
    assert store._slots_out == 0
    assert ledger.used(Tier.CPU) == 0


def test_an_error_that_nobody_saw_is_raised_by_close() -> None:
    """The last write fails after the load has ended; `close` says so."""
    store, model, slots, ledger, open_stream = open_failing("weights cannot be written")
    stream = open_stream(IoPolicy.MIXED)
    stream.begin(make_step(model, {(1, "weight"): 1}, "bfloat16"))
    stream.load(1, slots.lease().buffer, fetch=True).wait()
    with pytest.raises(StorageError, match="write of"):
        stream.close()
    store.close()
    assert ledger.used(Tier.CPU) == 0


def test_close_ends_what_was_queued_and_refuses_more() -> None:
    """A load that was queued before `close` is served; one after it is refused."""
    store, _, slots, _, open_stream = open_failing("a tile cannot be read")
    stream = open_stream(IoPolicy.MIXED)
    buffer = slots.lease().buffer
    load = stream.load(0, buffer, fetch=True)
    stream.close()
    assert load.done()
    load.wait()
    with pytest.raises(IllegalTransition, match="CLOSED"):
        stream.load(0, buffer, fetch=True)
    store.close()


@pytest.mark.parametrize(("states", "moves"), [(StreamState, STREAM_MOVES), (UpdateState, UPDATE_MOVES)])
def test_illegal_moves_are_refused(states, moves) -> None:  # type: ignore[no-untyped-def]
    """Every pair of states that is not in the table raises and names both."""
    for source in states:
        for target in set(states) - set(moves[source]):
            with pytest.raises(IllegalTransition, match=rf"{source.name}.*{target.name}"):
                Lifecycle("thing", source, moves).to(target)
