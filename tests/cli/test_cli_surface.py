"""The command line as a contract: its options, its imports, its help, its version; and `infinity clean`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import infinity
from infinity.cli import options
from infinity.cli.main import app
from infinity.config.config import SCHEMA
from infinity.models.presets import PRESETS
from infinity.store.directory import claim_run
from infinity.train.options import TrainOptions

TRAIN_OPTIONS = {
    "--nvme", "--model", "--data", "--eval-data", "--hold-out", "--eval-every", "--eval-batches", "--config", "--set",
    "--num-gpus", "--num-ranks", "--steps",
    "--micro-batch-size", "--micro-batches", "--seq-len", "--lr", "--lr-schedule", "--warmup-steps", "--weight-decay",
    "--grad-clip", "--precision", "--seed", "--cpu-memory", "--gpu-memory", "--offload-optimizer", "--offload-params",
    "--checksums", "--schedule", "--stage", "--output", "--checkpoint-every", "--keep", "--resume", "--check",
    "--save-weights", "--trace", "--print-config",
}  # fmt: skip
BENCH_NVME_OPTIONS = {
    "--nvme", "--size", "--engine", "--op", "--block-size", "--queue-depth", "--seconds", "--long-run", "--tune",
    "--against", "--json", "--plot",
}  # fmt: skip
BENCH_ADAM_OPTIONS = {"--parameters", "--kernel", "--threads", "--rounds", "--json", "--plot"}
PLAN_OPTIONS = {
    "--model", "--parameters", "--num-gpus", "--num-ranks", "--stage", "--precision", "--micro-batch-size",
    "--micro-batches", "--seq-len", "--schedule", "--gpu-memory", "--cpu-memory", "--nvme-space", "--offload-optimizer",
    "--offload-params", "--json",
}  # fmt: skip
ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def shown_options(*command: str) -> set[str]:
    answer = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert answer.exit_code == 0
    return set(re.findall(r"(?m)^\W*(--[a-z-]+)", answer.stdout)) - {"--help"}


def test_the_options_are_the_promised_ones() -> None:
    """The sets of options are frozen: adding one changes this test, renaming one breaks users."""
    assert shown_options("train") == TRAIN_OPTIONS
    assert shown_options("plan") == PLAN_OPTIONS
    assert shown_options("clean") == {"--list", "--checkpoints"}
    assert shown_options("doctor") == {"--nvme", "--json"}
    assert shown_options("bench", "nvme") == BENCH_NVME_OPTIONS
    assert shown_options("bench", "adam") == BENCH_ADAM_OPTIONS
    assert shown_options() == {"--version"}


def test_the_readme_explains_every_option() -> None:
    """Every option of the commands is in README.md."""
    readme = (ROOT / "README.md").read_text()
    promised = TRAIN_OPTIONS | PLAN_OPTIONS | BENCH_NVME_OPTIONS | BENCH_ADAM_OPTIONS | {"--list", "--checkpoints", "--json"}
    missing = [option for option in promised if not re.search(rf"{option}\b", readme)]
    assert missing == []


def test_flags_stand_for_keys_that_exist() -> None:
    """Each flag that sets a configuration key names a real key and a real option."""
    for flag, key in options.KEYS.values():
        assert flag in TRAIN_OPTIONS
        assert key in SCHEMA.fields


def test_defaults_of_the_command_are_those_of_the_job() -> None:
    """The command line and TrainOptions agree on what happens when nothing is asked for."""
    from inspect import signature

    from infinity.cli.train import train

    given = {name: parameter.default for name, parameter in signature(train).parameters.items()}
    fields = {name: field.default for name, field in TrainOptions.__dataclass_fields__.items()}
    shared = (given.keys() & fields.keys()) - {"config", "data"}
    assert len(shared) == 13
    assert {name: given[name] for name in shared} == {name: fields[name] for name in shared}


@pytest.mark.parametrize("code", [
    "import infinity; infinity.StorageError; infinity.Config; infinity.Placement",
    "from infinity.cli.main import app; from typer.testing import CliRunner; CliRunner().invoke(app, ['train', '--help'])",
    "from infinity.cli.main import app; from typer.testing import CliRunner; CliRunner().invoke(app, ['clean', '.'])",
    "import infinity.train.preflight, infinity.train.options",
    "from infinity.cli.main import app; from typer.testing import CliRunner\n"
    "assert CliRunner().invoke(app, ['train', '--data', '/absent']).exit_code == 10",
])  # fmt: skip
def test_torch_is_not_loaded_before_it_is_needed(code: str) -> None:
    """`import infinity`, its torch-free names, help, clean and the preflight load neither torch nor the native modules."""
    heavy = (
        "{'torch', 'infinity._aio', 'infinity._cpu_adam'}"
        if "absent" not in code and "preflight" not in code
        else "{'torch'}"
    )
    check = f"{code}\nimport sys\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_printed() -> None:
    """`infinity --version` prints the package's version."""
    assert CliRunner().invoke(app, ["--version"]).stdout == f"infinity {infinity.__version__}\n"


def test_public_names_are_sorted_and_resolve_lazily() -> None:
    """Names that are not public raise AttributeError; every public name is listed, sorted."""
    assert list(infinity.__all__)[:-1] == sorted(infinity.__all__[:-1])
    assert set(infinity.__all__) <= set(dir(infinity))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        infinity.nothing  # noqa: B018


def test_every_preset_is_in_the_readme() -> None:
    """The presets that --model takes are all named in README.md."""
    readme = (ROOT / "README.md").read_text()
    assert [name for name in PRESETS if name not in readme] == []


def leave_dead_run(directory: Path, name: str = "dead") -> Path:
    """Let another process make a run directory with a swap file, and die without removing it."""
    code = (
        "import os, sys; from pathlib import Path; from infinity.store.directory import claim_run\n"
        "run = claim_run(Path(sys.argv[1]), sys.argv[2]); (run.path / 'swap.bin').write_bytes(bytes(8192)); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", code, str(directory), name], env=ENVIRONMENT, check=False)
    return directory / f"infinity-{name}"


def test_clean_removes_dead_runs_and_nothing_else(tmp_path: Path) -> None:
    """A dead run's swap files go; a living run, the user's files and one beside the swap file stay (C20)."""
    dead = leave_dead_run(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    living = claim_run(tmp_path, "living")
    listed = CliRunner().invoke(app, ["clean", str(tmp_path), "--list"])
    assert re.search(r"infinity-dead  [0-9.]+ KiB  dead \(process \d+\)", listed.stdout)
    assert re.search(r"infinity-living  [0-9.]+ KiB  live", listed.stdout)
    assert dead.exists()
    answer = CliRunner().invoke(app, ["clean", str(tmp_path)])
    assert answer.exit_code == 0
    assert "dead (process" in answer.stdout
    assert "removed" in answer.stdout
    assert "in use" in answer.stdout
    assert not dead.exists()
    assert living.path.exists()
    assert (tmp_path / "mine.txt").read_text() == "mine"
    living.close()


def test_clean_knows_the_directories_of_ranks(tmp_path: Path) -> None:
    """Of a job over ranks each directory has a state of its own: dead ones go, a living rank's stays."""
    dead = [leave_dead_run(tmp_path, f"gpt-1m-rank{rank}") for rank in (0, 2)]
    living = claim_run(tmp_path, "gpt-1m-rank1")
    answer = CliRunner().invoke(app, ["clean", str(tmp_path)])
    assert [name in answer.stdout for name in ("gpt-1m-rank0", "gpt-1m-rank1", "gpt-1m-rank2")] == [True] * 3
    assert not any(path.exists() for path in dead)
    assert living.path.exists()
    living.close()


def test_clean_leaves_checkpoints_unless_told(tmp_path: Path) -> None:
    """A dead run that holds a checkpoint stays, is named, and goes only with --checkpoints."""
    run = leave_dead_run(tmp_path)
    (run / "committed.json").write_text("{}")
    answer = CliRunner().invoke(app, ["clean", str(tmp_path)])
    assert "holds a checkpoint" in answer.stdout
    assert run.exists()
    CliRunner().invoke(app, ["clean", str(tmp_path), "--checkpoints"])
    assert not run.exists()
