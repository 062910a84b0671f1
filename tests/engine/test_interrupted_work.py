"""What is cut short in the middle leaves nothing half held: updates, spilled gradients, checkpoints."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import BULK, open_engine, require_same, require_same_state, settings, train, train_engine

import infinity.engine.directories as directories
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.request import Op, Request
from infinity.checkpoint.stream import StreamWriter
from infinity.config import Config
from infinity.engine import EngineState
from infinity.errors import IllegalTransition, StorageError, SwapSpaceError
from infinity.handles import Handle
from infinity.optim.stream import UpdateStream
from infinity.placement import Placement
from infinity.store.store import Store

NVME = {"optim": "nvme", "params": "nvme"}


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("familiar", [False, True])
def test_an_update_that_is_interrupted_fails_the_engine(
    familiar: bool, interrupt: type[BaseException], nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of the update may be made: a checkpoint of it would be neither step, so only close is legal, and removes all."""
    engine = open_engine(BULK.build(), settings(nvme, **NVME))
    batches = BULK.batches(0, 1, torch.bfloat16)
    engine.train_batch(batches)
    begin = UpdateStream.begin

    def begin_and_break(self: UpdateStream, step: Any) -> None:
        begin(self, step)
        raise interrupt

    monkeypatch.setattr(UpdateStream, "begin", begin_and_break)

    def step() -> None:
        if familiar:
            engine.backward(engine(*batches[0]))
            engine.step()
        else:
            engine.train_batch(batches)

    with pytest.raises(interrupt):
        step()
    assert engine.state is EngineState.FAILED
    for call in (engine.state_dict, lambda: engine.save_checkpoint(nvme), lambda: engine.train_batch(batches)):
        with pytest.raises(IllegalTransition, match="FAILED"):
            call()
    engine.close()
    assert list(nvme.iterdir()) == []


class Watching(FaultyEngine):
    """Keeps every handle that it gave."""

    def __init__(self, engine: Any, faults: Sequence[Fault]) -> None:
        super().__init__(engine, faults)
        self.given: list[Handle[None]] = []

    def submit(self, requests: Sequence[Request]) -> list[Handle[None]]:
        handles = super().submit(requests)
        self.given += handles
        return handles


@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_synchronize_waits_for_every_tile(params: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With writes that end late, none is under way when synchronize returns, also where the weights stay in memory."""
    real, opened = directories.open_engine, []

    def open_slow(*args: Any, **kwargs: Any) -> Watching:
        slow = Fault(FaultKind.DELAY, lambda request: request.op is Op.WRITE, delay_seconds=0.02)
        opened.append(Watching(real(*args, **kwargs), [slow]))
        return opened[-1]

    monkeypatch.setattr(directories, "open_engine", open_slow)
    with open_engine(BULK.build(), settings(nvme, optim="nvme", params=params)) as engine:
        engine.train_batch(BULK.batches(0, 1, torch.bfloat16))
        num_before = len(opened[0].given)
        engine.synchronize()
        assert len(opened[0].given) > num_before
        assert all(handle.done() for handle in opened[0].given)


def test_a_gradient_that_cannot_even_be_written_gives_its_slot_back(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the write is refused at once the error is the storage's, and close finds every slot free."""
    config = settings(nvme, **NVME)
    placement = Placement.from_config(Config.from_any(config)).override("layers.*", grads="nvme")
    engine = open_engine(BULK.build(), config, placement=placement)

    def refuse(self: Store, shard: int, source: object) -> Handle[None]:
        raise StorageError(f"the gradient of shard {shard} was lost before", errno=errno.EIO)

    monkeypatch.setattr(Store, "publish_gradients", refuse)
    with pytest.raises(StorageError, match="was lost before"):
        engine.train_batch(BULK.batches(0, 1, torch.bfloat16))
    assert engine.state is EngineState.FAILED
    engine.close()  # IllegalTransition if a slot were still leased
    assert list(nvme.iterdir()) == []


@pytest.fixture
def broken_writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[StorageError]], None]:
    """Let the third write of a moment into a checkpoint fail: a tile's bytes are leased then."""
    write = StreamWriter.write

    def install(error: type[StorageError]) -> None:
        count = iter(range(1, 1000))

        def refuse_third(self: StreamWriter, name: str, first_element: int, data: memoryview) -> None:
            if name.startswith("exp_avg/") and next(count) == 3:
                raise error("no room for more", errno=errno.ENOSPC)
            write(self, name, first_element, data)

        monkeypatch.setattr(StreamWriter, "write", refuse_third)

    return install


@pytest.mark.parametrize("optim", ["nvme", "cpu"])
def test_a_checkpoint_that_fails_inside_a_tile_lets_training_go_on(
    optim: str, nvme: Path, tmp_path: Path, broken_writes: Callable[[type[StorageError]], None]
) -> None:
    """The tile that was read is given back: the next step and checkpoint work, with the bits of no failure."""
    config = settings(nvme, optim=optim, params="cpu", num_micro_batches=1)
    expected = train(BULK, config, num_steps=3)
    with open_engine(BULK.build(), config) as engine:
        begun = train_engine(engine, BULK, config, range(2))
        broken_writes(StorageError)
        with pytest.raises(StorageError, match="no room for more"):
            engine.save_checkpoint(tmp_path / "checkpoints")
        path = engine.save_checkpoint(tmp_path / "checkpoints")
        run = train_engine(engine, BULK, config, range(2, 3))
        run.losses = begun.losses + run.losses
        engine.load_checkpoint(path)
        require_same_state(engine.state_dict(), begun.state)
    require_same(run, expected)


def test_a_checkpoint_that_finds_no_room_inside_a_tile_is_committed_in_place(
    nvme: Path, tmp_path: Path, broken_writes: Callable[[type[StorageError]], None]
) -> None:
    """A disk that is full in the middle of a copy: the swap files themselves become the checkpoint, no tile is leased."""
    engine = open_engine(BULK.build(), settings(nvme, **NVME))
    engine.train_batch(BULK.batches(0, 1, torch.bfloat16))
    broken_writes(SwapSpaceError)
    path = engine.save_checkpoint(tmp_path / "checkpoints")
    expected = engine.state_dict()
    engine.close()
    with open_engine(BULK.build(), settings(nvme, **NVME), adopt=path) as resumed:
        resumed.load_checkpoint(path)
        require_same_state(resumed.state_dict(), expected)
