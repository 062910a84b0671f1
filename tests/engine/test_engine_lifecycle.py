"""From initialize to close: what errors leave behind, which calls are legal after them, and what close gives back."""

from __future__ import annotations

import errno
import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import BULK, TINY_GPT, Kit, TinyGpt, open_engine, require_same, settings, train, train_engine
from torch import nn

import infinity.engine.build as build
import infinity.engine.directories as directories
from infinity.aio.engine import Engine as IoEngine
from infinity.aio.faults import Fault, FaultKind, FaultyEngine
from infinity.aio.request import Op, Request
from infinity.config import Config
from infinity.engine import EngineState, gradient_path
from infinity.errors import (
    ConfigError,
    DoesNotFit,
    IllegalTransition,
    ModelError,
    OverBudget,
    StorageError,
    SwapSpaceError,
)
from infinity.memory.ledger import Ledger
from infinity.placement import Placement
from infinity.states import Tier

NVME = {"optim": "nvme", "params": "nvme"}


@pytest.fixture
def ledgers(monkeypatch: pytest.MonkeyPatch) -> list[Ledger]:
    """Every ledger that an engine is made with, so that it can be asked when the engine is gone."""
    made: list[Ledger] = []

    def make(*args: Any) -> Ledger:
        made.append(Ledger(*args))
        return made[-1]

    monkeypatch.setattr(build, "Ledger", make)
    return made


def booked_bytes(ledger: Ledger) -> dict[str, int]:
    """Return what owners that allocate still hold; activations are measured, not allocated."""
    return {line.owner: line.used_bytes for line in ledger.report() if line.used_bytes and line.owner != "activations"}


def stream_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "update-stream"]


class Switch:
    """Faults that a test turns on; counts the requests that they hit."""

    def __init__(self) -> None:
        self.on = False
        self.hits = 0

    def __call__(self, wanted: Callable[[Request], bool]) -> Callable[[Request], bool]:
        def applies(request: Request) -> bool:
            hit = self.on and wanted(request)
            self.hits += hit
            return hit

        return applies


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Let the engines that follow do their I/O through a FaultyEngine with the given fault."""
    real = directories.open_engine

    def install(fault: Fault) -> None:
        def open_faulty(*args: Any, **kwargs: Any) -> IoEngine:
            return FaultyEngine(real(*args, **kwargs), [fault])

        monkeypatch.setattr(directories, "open_engine", open_faulty)

    return install


def spilled(config: dict[str, Any]) -> Placement:
    return Placement.from_config(Config.from_any(config)).override("layers.*", grads="nvme")


# Closing


def test_close_gives_everything_back(nvme: Path, ledgers: list[Ledger]) -> None:
    """Swap files and their directory are gone, the ledger holds nothing, the thread has ended; closing twice is fine."""
    config = settings(nvme, **NVME)
    with open_engine(BULK.build(), config, placement=spilled(config)) as engine:
        assert len(list(nvme.iterdir())) == 1
        assert booked_bytes(ledgers[0])
        train_engine(engine, BULK, config, range(2))
        assert stream_threads()
    assert engine.state is EngineState.CLOSED
    assert list(nvme.iterdir()) == []
    assert booked_bytes(ledgers[0]) == {}
    assert stream_threads() == []
    engine.close()


@pytest.mark.parametrize("moment", ["at once", "after a step", "in a step", "after backward"])
def test_close_at_any_moment(moment: str, nvme: Path, ledgers: list[Ledger]) -> None:
    """With updates pending, loads begun ahead or a forward that was never finished: closing ends all and removes all."""
    engine = open_engine(BULK.build(), settings(nvme, **NVME))
    batch = BULK.batches(0, 1, torch.bfloat16)
    if moment == "after a step":
        engine.train_batch(batch)
    elif moment != "at once":
        loss = engine(*batch[0])
        if moment == "after backward":
            engine.backward(loss)
    engine.close()
    assert list(nvme.iterdir()) == []
    assert booked_bytes(ledgers[0]) == {}
    assert stream_threads() == []


def test_an_exception_in_the_with_block_closes_too(nvme: Path) -> None:
    """The user's exception passes through, and nothing is left on disk."""

    def use() -> None:
        with open_engine(TINY_GPT.build(), settings(nvme, **NVME)) as engine:
            engine.train_batch(TINY_GPT.batches(0, 1, torch.bfloat16))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert list(nvme.iterdir()) == []


@pytest.mark.parametrize(
    "end", ["", "raise SystemExit(3)", "os.fork() or sys.exit(); os.wait(); engine.train_batch(batches)"]
)
def test_the_end_of_the_program_closes_a_forgotten_engine(end: str, nvme: Path) -> None:
    """Without close the swap files go at exit all the same; a forked child that ends leaves them to its parent."""
    script = (
        "import os, sys, torch\nfrom pathlib import Path\nfrom kit import TINY_GPT, open_engine, settings\n"
        "engine = open_engine(TINY_GPT.build(), settings(Path(sys.argv[1]), optim='nvme', params='nvme'))\n"
        "batches = TINY_GPT.batches(0, 1, torch.bfloat16)\nengine.train_batch(batches)\n"
        "print([path.name for path in Path(sys.argv[1]).iterdir()], flush=True)\n"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", script + end, str(nvme)], capture_output=True, text=True, timeout=100, check=False,
        env=os.environ | {"PYTHONPATH": f"{here}:{here.parents[1]}"},
    )  # fmt: skip
    assert done.stdout == "['infinity-run']\n", done.stderr
    assert "Error" not in done.stderr
    assert list(nvme.iterdir()) == []


def test_two_engines_on_one_directory(nvme: Path) -> None:
    """Each has its own directory; they train in turn, and closing one leaves the other whole."""
    config = settings(nvme, **NVME)
    expected = train(TINY_GPT, config, num_steps=3)
    with open_engine(TINY_GPT.build(), config) as first:
        with open_engine(BULK.build(), config) as second:
            assert len(list(nvme.iterdir())) == 2
            begun = train_engine(first, TINY_GPT, config, range(1))
            train_engine(second, BULK, config, range(2))
        assert len(list(nvme.iterdir())) == 1
        run = train_engine(first, TINY_GPT, config, range(1, 3))
    run.losses = begun.losses + run.losses
    require_same(run, expected)


def test_files_of_the_user_are_not_touched(nvme: Path) -> None:
    """Whatever else lies in the directory is there afterwards."""
    (nvme / "mine.txt").write_text("mine")
    (nvme / "infinity-notes").mkdir()
    (nvme / "infinity-notes" / "swap.bin").write_text("not yours")
    with open_engine(TINY_GPT.build(), settings(nvme, **NVME)) as engine:
        engine.train_batch(TINY_GPT.batches(0, 1, torch.bfloat16))
    assert sorted(path.name for path in nvme.iterdir()) == ["infinity-notes", "mine.txt"]
    assert (nvme / "infinity-notes" / "swap.bin").read_text() == "not yours"


# Errors of initialize


class Boom(Exception):
    """What a test makes go wrong."""


def _boom(*_: Any, **__: Any) -> Any:
    raise Boom


@pytest.mark.parametrize(
    "where",
    [
        "open_store", "open_kernel", "open_update_stream", "open_weight_slots", "take_over", "Weights", "WaitingGradients",
        "open_gradient_slots", "GradientSums", "Optimizer", "Persistence", "VerticalSchedule",
    ],
)  # fmt: skip
def test_initialize_that_fails_leaves_nothing(
    where: str, nvme: Path, ledgers: list[Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever part cannot be made: no directory, no booked byte, no thread; the next attempt works."""
    config = settings(nvme, **NVME)
    with monkeypatch.context() as patched:
        patched.setattr(gradient_path if hasattr(gradient_path, where) else build, where, _boom)
        with pytest.raises(Boom):
            open_engine(BULK.build(), config, placement=spilled(config))
    assert list(nvme.iterdir()) == []
    assert all(booked_bytes(ledger) == {} for ledger in ledgers)
    assert stream_threads() == []
    train(BULK, config, num_steps=1)


@pytest.mark.parametrize("where", ["open_store", "open_update_stream", "open_weight_slots", "fill_shard"])
def test_initialize_that_fails_before_it_takes_over_leaves_the_model(
    where: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's module is as it was: same values, and it still runs."""
    model = TINY_GPT.build()
    monkeypatch.setattr(build, where, _boom)
    with pytest.raises(Boom):
        open_engine(model, settings(nvme, **NVME))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in TINY_GPT.build().state_dict().items())
    model(*TINY_GPT.batches(0, 1)[0]).backward()


def test_a_failing_initializer_leaves_nothing(nvme: Path, ledgers: list[Ledger]) -> None:
    """The user's init function raises half way: its exception passes through, the reserved files are gone."""
    calls = []

    def init(module: nn.Module, name: str) -> None:
        calls.append(name)
        if len(calls) == 5:
            raise Boom(name)
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    with torch.device("meta"):
        model = TinyGpt()
    model.register_buffer("positions", torch.zeros(32), persistent=False)
    model.register_buffer("gain", torch.ones(()))
    with pytest.raises(Boom):
        open_engine(model, settings(nvme, **NVME), init=init)
    assert list(nvme.iterdir()) == []
    assert booked_bytes(ledgers[0]) == {}


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"cpu_memory": "64KiB"}, DoesNotFit, "KiB"),
        ({"nvme": ["/dev/null"]}, StorageError, "/dev/null"),
        ({"nvme": ["/nowhere/at/all"]}, StorageError, "/nowhere/at/all"),
        ({"unknown_key": 1}, ConfigError, "unknown_key"),
        ({"units": "NoSuchModule"}, ConfigError, "NoSuchModule"),
    ],
)
def test_bad_settings_are_one_sentence(changes: dict[str, Any], error: type[Exception], said: str, nvme: Path) -> None:
    """A budget too small, a device node, a missing directory, an unknown key or unit: named, with nothing left behind."""
    config = settings(nvme, **NVME)
    with pytest.raises(error, match=said):
        open_engine(TINY_GPT.build(), {**config, "infinity": {**config["infinity"], **changes}})
    assert list(nvme.iterdir()) == []


def test_compiled_models_are_refused(nvme: Path) -> None:
    """A torch.compile'd model, or one with a compiled part, is refused with a sentence before anything is reserved."""
    for model in (torch.compile(TINY_GPT.build()), nn.Sequential(torch.compile(nn.Linear(4, 4)))):
        with pytest.raises(ModelError, match=r"torch\.compile"):
            open_engine(model, settings(nvme, **NVME))
    assert list(nvme.iterdir()) == []


def test_memory_that_is_taken_elsewhere_is_over_budget(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an allocation would exceed the budget after all, OverBudget names owner and bytes, and all is given back."""
    made: list[Ledger] = []

    def crowded(*args: Any) -> Ledger:
        made.append(Ledger(*args))
        made[-1].take(Tier.CPU, "somebody else", (made[-1].budget(Tier.CPU) or 0) - (64 << 10))
        return made[-1]

    monkeypatch.setattr(build, "Ledger", crowded)
    with pytest.raises(OverBudget, match="somebody else"):
        open_engine(BULK.build(), settings(nvme, **NVME))
    assert list(booked_bytes(made[0])) == ["somebody else"]
    assert list(nvme.iterdir()) == []


# Disks


def test_a_disk_too_small_is_known_before_anything_is_written(small_disk: Path, ledgers: list[Ledger]) -> None:
    """An 8 MiB file system and 10 MB of state: needed and free bytes are said, and the file system is as it was."""
    kit = Kit("odd", lambda: nn.Sequential(nn.Linear(1024, 1024)), lambda generator, step: (torch.randn(1, 1024),))
    with pytest.raises((SwapSpaceError, DoesNotFit), match=r"[Nn]eed.*MiB.*free|free.*MiB"):
        open_engine(kit.build(), settings(small_disk, **NVME))
    assert list(small_disk.iterdir()) == []
    assert all(booked_bytes(ledger) == {} for ledger in ledgers)


def test_tmpfs_works_and_counts_as_memory(small_disk: Path, nvme: Path) -> None:
    """C28: swap files on tmpfs train with the bits of a disk, and are booked: they are RAM."""
    run = train(TINY_GPT, settings(small_disk, **NVME))
    require_same(run, train(TINY_GPT, settings(nvme, **NVME)))
    num_bytes = sum(parameter.numel() for parameter in TINY_GPT.build().parameters()) * 12
    assert max(line.peak_bytes for line in run.memory if "tmpfs" in line.owner or "swap" in line.owner) >= num_bytes


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
@pytest.mark.parametrize("kind", [FaultKind.ERROR, FaultKind.SHORT], ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE], ids=lambda op: op.name.lower())
@pytest.mark.parametrize("nth", [1, 7, 40])
def test_a_storage_error_ends_the_engine(
    nth: int, op: Op, kind: FaultKind, schedule: str, nvme: Path, ledgers: list[Ledger], faulty: Callable[[Fault], None]
) -> None:
    """The n-th read or write of a step fails, whole or torn: StorageError with path and errno by the next synchronize at the

    latest; then the engine is FAILED, every call but close says so, and close leaves nothing behind.
    """
    switch = Switch()
    count = iter(range(1, 1 << 20))
    faulty(Fault(kind, switch(lambda request: request.op is op and next(count) == nth), errno=errno.EIO))
    config = settings(nvme, num_micro_batches=2, schedule=schedule, **NVME)
    engine = open_engine(BULK.build(), config, placement=spilled(config))
    engine.train_batch(BULK.batches(0, 2, torch.bfloat16))
    engine.synchronize()
    switch.on = True

    def go_on() -> None:
        for step in (1, 2):
            engine.train_batch(BULK.batches(step, 2, torch.bfloat16))
            engine.synchronize()

    with pytest.raises(StorageError) as caught:
        go_on()
    assert switch.hits == 1
    assert caught.value.errno == errno.EIO
    assert str(nvme) in str(caught.value)
    assert engine.state is EngineState.FAILED
    for call in (lambda: engine.train_batch(BULK.batches(3, 2)), engine.state_dict, engine.step, engine.synchronize):
        with pytest.raises(IllegalTransition, match="FAILED"):
            call()
    engine.close()
    assert list(nvme.iterdir()) == []
    assert booked_bytes(ledgers[0]) == {}
    assert stream_threads() == []


@pytest.mark.parametrize("where", ["forward", "backward", "step", "state_dict", "evaluation", "save"])
def test_an_error_anywhere_in_the_familiar_loop(
    where: str, nvme: Path, tmp_path: Path, faulty: Callable[[Fault], None]
) -> None:
    """Every read fails from one moment on: whichever call meets it raises StorageError and the engine is FAILED."""
    switch = Switch()
    faulty(Fault(FaultKind.ERROR, switch(lambda request: request.op is Op.READ), errno=errno.EIO))
    engine = open_engine(BULK.build(), settings(nvme, weight_slots=2, **NVME))
    batch = BULK.batches(0, 1, torch.bfloat16)[0]
    engine.backward(engine(*batch))
    engine.step()
    loss = engine(*batch) if where in ("backward", "step") else None
    if where == "step" and loss is not None:
        engine.backward(loss)
    switch.on = True

    def evaluate() -> None:
        engine.eval()
        engine(*batch)

    def step_twice() -> None:
        engine.step()
        engine.synchronize()

    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: engine(*batch),
        "backward": lambda: engine.backward(loss),
        "step": step_twice,
        "state_dict": engine.state_dict,
        "evaluation": evaluate,
        "save": lambda: engine.save_checkpoint(tmp_path / "checkpoints"),
    }
    with pytest.raises(StorageError, match=str(nvme)):
        calls[where]()
    assert engine.state is EngineState.FAILED
    engine.close()
    assert list(nvme.iterdir()) == []


@pytest.mark.parametrize("schedule", ["vertical", "horizontal"])
def test_slow_io_changes_no_bit(schedule: str, nvme: Path, faulty: Callable[[Fault], None]) -> None:
    """C90: with random delays in reads and writes buffers are never used again too early: losses and states are the same."""
    config = settings(nvme, num_micro_batches=2, schedule=schedule, weight_slots=2, tile_slots=2, **NVME)
    expected = train(BULK, config, placement=spilled(config), num_steps=4)
    draw = random.Random(3)
    faulty(Fault(FaultKind.DELAY, lambda request: draw.random() < 0.2, delay_seconds=0.004))
    require_same(train(BULK, config, placement=spilled(config), num_steps=4), expected)


def test_engines_do_not_pile_up(nvme: Path) -> None:
    """Six engines made and closed leave no thread, no open file and no directory."""
    fds = Path("/proc/self/fd")
    before = None
    for _ in range(6):
        train(TINY_GPT, settings(nvme, **NVME), num_steps=1)
        gc.collect()
        before = before or (threading.active_count(), len(list(fds.iterdir())))
    assert (threading.active_count(), len(list(fds.iterdir()))) == before
    assert list(nvme.iterdir()) == []
