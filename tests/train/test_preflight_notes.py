"""What the preflight says, removes and undoes before anything heavy starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from training_fakes import Remembering, fake_options

from infinity.checkpoint.manifest import CheckpointState, Counters, FileRecord, Fingerprint
from infinity.checkpoint.writer import write_checkpoint
from infinity.comm.launched import ONE_RANK, Ranks
from infinity.config import Layer
from infinity.errors import ConfigError, DataError, DoesNotFit, StorageError, SwapSpaceError
from infinity.train.options import TrainOptions, native_bf16, resolve_config
from infinity.train.preflight import check_run, check_wanted, least_nvme_bytes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(b"some text" * 100)
    return path


def config_for(directory: Path, **keys: object) -> object:
    layers = [Layer("test", {"infinity.nvme": str(directory), **keys})]
    return resolve_config(layers, model="gpt-1m", steps=6, has_native_bf16=True)


def test_a_directory_made_for_a_run_that_cannot_start_goes_again(tmp_path: Path, data: Path) -> None:
    """Too little space says needed and free bytes, and the directory that was made is gone; one that was there stays."""
    forced = {"zero_optimization.offload_optimizer.device": "nvme", "zero_optimization.offload_param.device": "nvme"}
    for directory, stays in ((tmp_path / "new", False), (tmp_path / "old", True)):
        if stays:
            directory.mkdir()
        options = replace(fake_options(tmp_path / "out", data), model="gpt-70b", config=config_for(directory, **forced))
        with pytest.raises(SwapSpaceError, match=r"needs 783.06 GiB \(\d+ bytes\), .* are free"):
            check_run(options, Remembering())
        assert directory.exists() is stays


def test_what_no_plan_can_place_is_refused_before_torch_is_loaded(tmp_path: Path, data: Path) -> None:
    """More state than memory and disk together says all three; as much as there is may start."""

    def options(model: str, memory: str) -> TrainOptions:
        layers = [Layer("test", {"infinity.cpu_memory": memory})]
        config = resolve_config(layers, model=model, steps=6, has_native_bf16=True)
        return replace(fake_options(tmp_path / "out", data), model=model, config=config)

    with pytest.raises(DoesNotFit, match=r"need 783\.06 GiB; the memory has 780\.00 GiB, no --nvme is given"):
        check_run(options("gpt-70b", "780GiB"), Remembering())
    assert check_run(options("gpt-70b", "784GiB"), Remembering()).gpt.num_layers > 0
    free = replace(options("gpt-70b", "1GiB"), config=config_for(tmp_path / "new", **{"infinity.cpu_memory": "1GiB"}))
    if shutil.disk_usage(tmp_path).free < 780 << 30:
        with pytest.raises(DoesNotFit, match=r"1\.00 GiB, the NVMe directories \d+"):
            check_run(free, Remembering())
        assert not (tmp_path / "new").exists()


def test_a_checkpoint_in_place_needs_no_second_room(tmp_path: Path, data: Path) -> None:
    """Where the swap files of a checkpoint in place fill the disk, resuming goes on in them and asks for no more space."""
    directory, swap = tmp_path / "nvme", tmp_path / "swap.bin"
    with swap.open("wb") as file:
        file.truncate(800 << 30)  # sparse
    state = CheckpointState(Fingerprint((), {}), "bf16", Counters(3, 3, 0, 3, {}), {}, None)
    place = write_checkpoint(tmp_path / "checkpoints", (), state, swap_files=[FileRecord(str(swap), 800 << 30, None)])
    forced = {"zero_optimization.offload_optimizer.device": "nvme", "zero_optimization.offload_param.device": "nvme"}
    config = config_for(directory, **forced)
    options = replace(fake_options(tmp_path / "out", data), model="gpt-70b", config=config)
    assert check_run(replace(options, resume=str(place)), Remembering()).resume_from == place
    with pytest.raises(SwapSpaceError, match=r"needs 783.06 GiB"):
        check_run(options, Remembering())


def test_bad_data_are_found_before_any_directory_is_made(tmp_path: Path, data: Path) -> None:
    """Data too short for a sequence stop the run before its NVMe directory exists."""
    options = replace(fake_options(tmp_path / "out", data), seq_len=1000, config=config_for(tmp_path / "new"))
    with pytest.raises(DataError, match="found 900 bytes"):
        check_run(options, Remembering())
    assert not (tmp_path / "new").exists()


def test_swap_files_of_dead_runs_are_removed_and_named(tmp_path: Path, data: Path) -> None:
    """A run that was killed leaves its directory; the next run removes it, says so, and sees the space (C20)."""
    code = (
        "import os, sys; from pathlib import Path; from infinity.store.directory import claim_run\n"
        "claim_run(Path(sys.argv[1]), 'killed'); os._exit(9)"
    )
    directory = tmp_path / "nvme"
    directory.mkdir()
    subprocess.run([sys.executable, "-c", code, str(directory)], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert (directory / "infinity-killed").exists()
    reporter = Remembering()
    check_run(replace(fake_options(tmp_path / "out", data), config=config_for(directory)), reporter)
    assert not (directory / "infinity-killed").exists()
    assert any("infinity-killed, the swap files of a dead run" in note for note in reporter.notes)


def test_memory_file_systems_are_said_to_be_ram(tmp_path: Path, data: Path) -> None:
    """A directory on tmpfs works and is said, once, to be memory and not a disk (C28)."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        pytest.skip("no /dev/shm to write to")
    reporter = Remembering()
    check_run(replace(fake_options(tmp_path / "out", data), config=config_for(memory)), reporter)
    assert len([note for note in reporter.notes if "tmpfs" in note]) == 1


@pytest.mark.parametrize(("stage", "ranks", "expected"), [
    (None, Ranks(0, 0, 4, 4), 12), (3, Ranks(2, 0, 4, 2), 6), (2, Ranks(0, 0, 4, 4), 10 + 4 * 2),
    (0, Ranks(0, 0, 4, 4), 4 * 12), (1, Ranks(2, 0, 4, 2), 5 + 2 * 2), (0, ONE_RANK, 12),
])  # fmt: skip
def test_least_bytes_on_the_disks_of_one_machine(tmp_path: Path, stage: int | None, ranks: Ranks, expected: int) -> None:
    """What a stage partitions counts once over all ranks, everything else for each rank of this machine; bf16, 10 + 2."""
    given: dict[str, object] = {
        f"zero_optimization.{name}.device": "nvme" for name in ("offload_optimizer", "offload_param")
    }
    if stage is not None:
        given["zero_optimization.stage"] = stage
    assert least_nvme_bytes(config_for(tmp_path, **given), 1000, ranks) == 1000 * expected


def test_weights_on_nvme_below_stage_3_are_refused_before_any_rank_starts(tmp_path: Path, data: Path) -> None:
    """The launcher itself says so, once, and makes no directory; one rank, and stage 3, may have them there."""

    def options(stage: int) -> TrainOptions:
        given = {"zero_optimization.stage": stage, "zero_optimization.offload_param.device": "nvme"}
        return replace(fake_options(tmp_path / "out", data), config=config_for(tmp_path / "nvme", **given))

    with pytest.raises(ConfigError, match="in stage 1 each of 2 ranks computes with all of them") as caught:
        check_wanted(options(1), 2)
    assert "--stage 3" in caught.value.remedy
    assert not (tmp_path / "nvme").exists()
    assert check_wanted(options(1), 1).batch.world_size == 1
    assert check_wanted(options(3), 2).batch.world_size == 2


def test_a_machine_is_checked_by_one_of_its_ranks(tmp_path: Path, data: Path) -> None:
    """All ranks of a machine need their parts together; its other ranks leave the question, and the output, to the first."""
    layers = [Layer("test", {"infinity.cpu_memory": "400GiB"})]
    config = resolve_config(layers, model="gpt-70b", steps=6, has_native_bf16=True)
    closed = tmp_path / "text" / "below-a-file"
    options = replace(fake_options(tmp_path / "out", data), model="gpt-70b", config=config)
    with pytest.raises(DoesNotFit, match=r"need 783\.06 GiB; the memory has 400\.00 GiB"):
        check_run(options, Remembering(), Ranks(0, 0, 4, 4))
    assert check_run(options, Remembering(), Ranks(0, 0, 4, 2)).batch.train_batch_size == 16
    other = check_run(replace(options, output=closed), Remembering(), Ranks(1, 1, 4, 4))
    assert other.ranks.global_rank == 1
    with pytest.raises(StorageError, match="not a directory"):
        check_run(replace(options, output=closed), Remembering(), Ranks(0, 0, 4, 2))


@pytest.mark.parametrize(("is_bf16", "optimizer", "params", "expected"), [
    (True, "nvme", "nvme", 12), (True, "nvme", "cpu", 10), (False, "nvme", "nvme", 12), (False, "auto", "nvme", 4),
    (True, "auto", "auto", 0),
])  # fmt: skip
def test_least_bytes_on_disk(tmp_path: Path, is_bf16: bool, optimizer: str, params: str, expected: int) -> None:
    """Bytes per parameter that are forced to disk: 10 + 2 in bf16, 8 + 4 in fp32."""
    keys: dict[str, object] = {"zero_optimization.offload_optimizer.device": optimizer,
                               "zero_optimization.offload_param.device": params, "bf16.enabled": is_bf16}  # fmt: skip
    assert least_nvme_bytes(config_for(tmp_path, **keys), 1000) == 1000 * expected


def test_bf16_is_chosen_where_the_machine_multiplies_it(tmp_path: Path) -> None:
    """x86 with AVX-512 BF16 or AMX and Arm with BF16 have it; an older CPU and a system without the table do not."""
    table = tmp_path / "cpuinfo"
    for text, expected in (
        ("flags : fpu avx512_bf16", True),
        ("Features : asimd bf16", True),
        ("flags : avx2 avx512f", False),
    ):
        table.write_text(text)
        assert native_bf16(table, devices=tmp_path) is expected
    assert not native_bf16(tmp_path / "absent", devices=tmp_path)
    (tmp_path / "nvidia0").touch()
    assert native_bf16(tmp_path / "absent", devices=tmp_path)


def test_what_the_user_says_wins_over_what_is_chosen(tmp_path: Path) -> None:
    """Choices fill only what the layers leave open, and a total batch size is not contradicted by chosen parts."""
    config = resolve_config([Layer("test", {"train_batch_size": 6, "optimizer.params.lr": 1e-5})], model="gpt-1m", steps=6,
                            has_native_bf16=False)  # fmt: skip
    batch = config.batch(world_size=1)
    assert (batch.train_batch_size, config.optimizer.params.lr, config.bf16.enabled) == (6, 1e-5, False)
    assert config.scheduler.params.total_num_steps == 6
    small, large = (resolve_config([], model=model, steps=9, has_native_bf16=True) for model in ("gpt-25m", "gpt-7b"))
    assert small.optimizer.params.lr > large.optimizer.params.lr
