"""The Adam benchmark: every kernel and path, compared in turn, with results that say what they are."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from infinity.bench.adam import AdamReport, AdamSettings, Bound, run_adam_benchmark
from infinity.bench.adam_data import AdamData, open_adam_data_arena
from infinity.bench.adam_paths import PATHS
from infinity.bench.caches import last_level_cache_bytes
from infinity.bench.rounds import Contender, Timings, time_in_turn
from infinity.cli.main import app
from infinity.errors import ConfigError, DoesNotFit
from infinity.memory.limits import HostLimit
from infinity.optim.kernel import kernel_names

SMALL = AdamSettings(num_parameters=20_000, num_rounds=2)


@pytest.fixture(scope="module")
def report() -> AdamReport:
    return run_adam_benchmark(SMALL)


def test_every_kernel_is_measured_on_every_path(report: AdamReport) -> None:
    """C48, C50: all kernels and the bare loop on all paths, torch's two on the path that it has."""
    got = [(result.path, result.kernel) for result in report.results]
    expected = [(path.name, name) for path in PATHS for name in ("limit", *kernel_names())]
    assert sorted(got) == sorted([*expected, ("fp32", "torch_fused"), ("fp32", "torch_foreach")])
    assert report.num_parameters == 20_480  # whole pages of every stream


def test_a_result_says_how_fast_against_what_and_what_limits_it(report: AdamReport) -> None:
    """C48: rates with their spread, ratios to the bare loop and to torch, and the bound of our kernels."""
    for result in report.results:
        path = next(path for path in PATHS if path.name == result.path)
        assert result.parameters_per_second_min <= result.parameters_per_second <= result.parameters_per_second_max
        assert result.bytes_per_second == pytest.approx(result.parameters_per_second * path.bytes_moved)
        assert (result.ratio_to_limit == 1.0) or result.kernel != "limit"
        assert (result.ratio_to_torch_fused is None) == (result.path != "fp32")
        is_ours = result.kernel in kernel_names()
        assert isinstance(result.bound, Bound) == is_ours
        assert (result.arithmetic_parameters_per_second is None) != is_ours


def test_bytes_are_those_that_an_update_moves() -> None:
    """28 bytes for fp32, 26 for a split bf16 master; a separate low-precision weight is written only."""
    assert {path.name: path.bytes_moved for path in PATHS} == {
        "fp32": 28, "bf16_split": 26, "fp32_out_bf16": 28, "fp32_out_fp16": 28,
    }  # fmt: skip


def test_a_set_that_caches_hold_is_said(report: AdamReport) -> None:
    """Less than four times the last level of cache: some bytes did not come from memory."""
    (note,) = report.notes
    assert "cache" in note


def test_threads_are_the_ones_asked_for_and_torchs_are_put_back() -> None:
    """Each count once, more than there are cores as many as cores; the process's torch keeps its number."""
    before = torch.get_num_threads()
    settings = replace(SMALL, kernel="scalar", threads=(1, 1), num_rounds=1)
    assert {result.threads for result in run_adam_benchmark(settings).results} == {1}
    assert torch.get_num_threads() == before


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    """1e9 parameters in 10 GB: needed, free, the source of the limit and the most that fits."""
    with pytest.raises(DoesNotFit, match=r"1,000,001,536 parameters need .* 9.31 GiB are free \(cgroup\)") as refused:
        run_adam_benchmark(replace(SMALL, num_parameters=10**9), free=HostLimit(10**10, "cgroup"))
    assert refused.value.remedy == "Give at most 374,996,992."


@pytest.mark.parametrize(("settings", "named"), [
    (replace(SMALL, kernel="sse9"), "sse9"),
    (replace(SMALL, num_rounds=0), "Rounds: 0"),
    (replace(SMALL, num_parameters=0), "Parameters: 0"),
])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings: AdamSettings, named: str) -> None:
    """Unknown kernels and counts below one."""
    with pytest.raises(ConfigError, match=named):
        run_adam_benchmark(settings)


def test_all_values_of_the_buffers_are_ordinary() -> None:
    """No subnormal, no infinity: those would be another benchmark. Streams do not overlap."""
    for path in PATHS:
        with open_adam_data_arena(10_000, (path,)) as arena:
            data = AdamData(arena.buffer, 10_000)
            data.fill(path)
            for stream in path.streams:
                if stream.dtype != "int16":
                    values = data.tensor(path, stream.name).float().abs()
                    assert values.isfinite().all()
                    assert values[values > 0].min() > 1e-30


def test_contenders_take_turns_and_every_other_round_is_reversed() -> None:
    """Each runs once before it counts, then in every round; a round's ratio is taken within the round."""
    calls: list[str] = []
    contenders = [Contender(name, partial(calls.append, name)) for name in "ab"]
    time_in_turn(contenders, 2, clock=iter(range(100)).__next__)
    assert "".join(calls) == "aabb" + "ab" + "ba"
    assert Timings((2.0, 4.0, 6.0)).ratio_to(Timings((1.0, 6.0, 3.0))) == 0.5


def test_what_is_over_too_soon_is_run_several_times_for_one_sample() -> None:
    """A run of 5 ms is repeated four times: samples of 20 ms."""
    now = 0.0

    def run() -> None:
        nonlocal now
        now += 0.005

    timings = time_in_turn([Contender("a", run)], 3, clock=lambda: now)
    assert timings["a"].seconds == pytest.approx((0.005,) * 3)
    assert now == pytest.approx(0.005 * (2 + 3 * 4))


def test_the_last_level_of_cache_is_counted_once_for_all_that_share_it(tmp_path: Path) -> None:
    """Two cores with one L3 of 32 MiB, and one L3 for each of two groups."""

    def core(number: int, level: str, kind: str, size: str, sharers: str) -> None:
        directory = tmp_path / f"cpu{number}" / "cache" / f"index{level}{kind[0]}"
        directory.mkdir(parents=True)
        for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", sharers)):
            (directory / name).write_text(text + "\n")

    for number in range(4):
        core(number, "1", "Instruction", "32K", str(number))
        core(number, "2", "Unified", "1024K", str(number))
        core(number, "3", "Unified", "32M", "0-1" if number < 2 else "2-3")
    assert last_level_cache_bytes(tmp_path) == 64 << 20
    assert last_level_cache_bytes(tmp_path / "none") is None


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    """`infinity bench adam --json`: the promised keys, null where there is nothing to compare with, and provenance."""
    file = tmp_path / "adam.json"
    options = ["--parameters", "2e4", "--kernel", "scalar", "--threads", "1", "--rounds", "1", "--json", str(file)]
    answer = CliRunner().invoke(app, ["bench", "adam", *options], env={"COLUMNS": "200"})
    assert answer.exit_code == 0, answer.output
    assert "scalar" in answer.output
    written = json.loads(file.read_text())
    assert written["provenance"].keys() >= {"command", "versions", "hardware"}
    row = next(row for row in written["results"] if (row["path"], row["kernel"]) == ("bf16_split", "scalar"))
    assert row.keys() >= {
        "path", "kernel", "threads", "parameters_per_second", "bytes_per_second", "ratio_to_limit", "ratio_to_torch_fused",
    }  # fmt: skip
    assert row["ratio_to_torch_fused"] is None
    assert math.isfinite(row["ratio_to_limit"])
    assert row["bound"] in ("memory", "arithmetic")


@pytest.mark.parametrize(("arguments", "named"), [
    (["--parameters", "many"], "'many' is not a whole number"),
    (["--parameters", "2.5"], "'2.5' is not a whole number"),
    (["--plot", "adam.pdf"], "adam.pdf"),
    (["--json", "/nowhere/adam.json"], "there is no directory /nowhere"),
])  # fmt: skip
def test_options_that_mean_nothing_are_refused(arguments: list[str], named: str) -> None:
    """Exit code 2 and the value, before anything is measured."""
    answer = CliRunner().invoke(app, ["bench", "adam", *arguments])
    assert answer.exit_code == 2
    assert named in answer.output


def test_a_picture_is_drawn_of_the_adam_benchmark(report: AdamReport, tmp_path: Path) -> None:
    """The file is a PNG of some size."""
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    from infinity.bench.adam_plot import plot_adam

    plot_adam(tmp_path / "adam.png", report.results)
    content = (tmp_path / "adam.png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000
