"""The search for the best setting on disks whose answer is known, in the time it has; and the configuration it gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_fakes import FakeDisk

from infinity.bench.nvme_tune import (
    DEFAULT_BLOCK_BYTES,
    DEFAULT_QUEUE_DEPTH,
    Setting,
    candidate_jobs,
    config_section,
    search,
)
from infinity.byte_sizes import KIB, MIB
from infinity.config import Config, file_layer
from infinity.train.options import resolve_config

DEFAULT = Setting("uring", DEFAULT_BLOCK_BYTES, DEFAULT_QUEUE_DEPTH)


@pytest.mark.parametrize(
    "best",
    [
        Setting("threads", 4 * MIB, 16),
        Setting("uring", 256 * KIB, 64),
        Setting("uring", DEFAULT_BLOCK_BYTES, 8),
        DEFAULT,
    ],
)
def test_the_best_setting_is_found(best: Setting) -> None:
    """Engine, block and depth are found one after another; the default stays where it is the best."""
    disk = FakeDisk(best=best)
    tuned = search(("uring", "threads"), disk.try_out, lambda: 100.0 - disk.now)
    assert tuned.best == best
    assert not tuned.cut_short
    assert [trial.setting for trial in tuned.trials] == disk.tried


def test_a_gain_within_noise_does_not_move_it() -> None:
    """A setting that is two per cent better is no reason to leave the default."""
    disk = FakeDisk(best=Setting("threads", 4 * MIB, 16), gain=1.02)
    assert search(("uring", "threads"), disk.try_out, lambda: 100.0 - disk.now).best == DEFAULT


@pytest.mark.parametrize("available_seconds", [0.0, 1.0, 3.5, 8.0])
def test_the_search_ends_in_time(available_seconds: float) -> None:
    """However little time there is, the default is tried, no trial begins that would end too late, and a result comes."""
    disk = FakeDisk(best=Setting("threads", 4 * MIB, 16))
    tuned = search(("uring", "threads"), disk.try_out, lambda: available_seconds - disk.now)
    assert disk.tried[0] == DEFAULT
    assert disk.now <= max(available_seconds, 1.0)
    assert tuned.cut_short
    assert tuned.best in disk.tried


def test_every_trial_is_a_job_that_was_provided_for() -> None:
    """The buffers are made for `candidate_jobs`; no search leaves them."""
    shapes = {(job.block_bytes, job.queue_depth) for job in candidate_jobs()}
    for best in (Setting("uring", 8 * MIB, 8), Setting("uring", 256 * KIB, 64), Setting("uring", 4 * MIB, 64)):
        disk = FakeDisk(best=best)
        search(("uring",), disk.try_out, lambda disk=disk: 100.0 - disk.now)
        assert {(setting.block_bytes, setting.queue_depth) for setting in disk.tried} <= shapes


def test_training_accepts_the_configuration_as_it_is(tmp_path: Path) -> None:
    """The file that --tune writes is a configuration of `infinity train`, and means what was found (C145)."""
    path = tmp_path / "infinity-nvme.json"
    path.write_text(json.dumps(config_section(Setting("threads", 4 * MIB, 16), [tmp_path])))
    config: Config = resolve_config([file_layer(path)], model="gpt-1m", steps=1, has_native_bf16=True)
    assert config.aio.block_size == 4 * MIB
    assert config.aio.queue_depth == 16
    assert config.infinity.engine == "threads"
    assert config.nvme_directories == (tmp_path,)
