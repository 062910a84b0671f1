"""Layers are merged in a fixed order, and every value knows its source."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from infinity.config import Config, Layer, SourcedValue, file_layer, flag_layer, set_layer
from infinity.errors import ConfigError


def test_flag_wins_over_set_over_file_over_default(tmp_path: Path) -> None:
    """The strongest source wins, and the sources name what it wins over (C138, C141)."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": {"params": {"lr": 0.1, "eps": 1e-5}}, "seed": 3, "gradient_clipping": 2.0}))
    config = Config.from_layers(
        [
            file_layer(path),
            set_layer("optimizer.params.lr=0.2"),
            set_layer("seed=4"),
            flag_layer("--lr", "optimizer.params.lr", 0.3),
        ]
    )
    sources = config.sources()
    assert config.optimizer.params.lr == 0.3
    assert sources["optimizer.params.lr"].source == (
        f"--lr, which wins over 0.2 from --set optimizer.params.lr, which wins over 0.1 from {path}"
    )
    assert sources["seed"] == SourcedValue(4, f"--set seed, which wins over 3 from {path}")
    assert sources["optimizer.params.eps"] == SourcedValue(1e-5, str(path))
    assert sources["bf16.enabled"] == SourcedValue(False, "default")


def test_equal_values_are_no_conflict() -> None:
    """The same value given twice names only the strongest source."""
    config = Config.from_layers([Layer("ds.json", {"seed": 3}), flag_layer("--seed", "seed", 3)])
    assert config.sources()["seed"] == SourcedValue(3, "--seed")


def test_auto_takes_a_weaker_source_away_and_leaves_the_default() -> None:
    """`auto` means the default, says who asked for it, and yields to a flag."""
    config = Config.from_any({"gradient_clipping": "auto", "infinity": {"cpu_memory": "auto", "engine": "auto"}})
    assert config.gradient_clipping == 1.0
    assert config.infinity.cpu_memory is None
    assert config.sources()["gradient_clipping"].source == "default (config says auto)"
    flagged = Config.from_layers([Layer("ds.json", {"seed": "auto"}), flag_layer("--seed", "seed", 9)])
    assert flagged.sources()["seed"] == SourcedValue(9, "--seed")


def test_what_the_program_chooses_fills_in_what_is_open_or_auto() -> None:
    """Chosen values yield to every layer, take the place of auto, and say who asked for it."""
    chosen = Layer("chosen", {"optimizer.params.lr": 0.5, "seed": 7, "gradient_clipping": 2.0})
    config = Config.from_layers([Layer("ds.json", {"seed": "auto", "gradient_clipping": 3.0})], chosen)
    sources = config.sources()
    assert sources["optimizer.params.lr"] == SourcedValue(0.5, "chosen")
    assert sources["seed"] == SourcedValue(7, "chosen (ds.json says auto)")
    assert sources["gradient_clipping"] == SourcedValue(3.0, "ds.json")
    assert [config.is_given(key) for key in ("seed", "gradient_clipping")] == [False, True]
    assert [config.says_auto(key) for key in ("seed", "gradient_clipping")] == [True, False]


def test_resolved_shows_the_batch_arithmetic_and_the_schedulers_own_keys() -> None:
    """The missing members of the triple are there with their product; parameters of other schedulers are not."""
    resolved = Config.from_any(
        {
            "train_batch_size": 24,
            "gradient_accumulation_steps": "auto",
            "train_micro_batch_size_per_gpu": 2,
            "scheduler": {"type": "WarmupLR"},
        }
    ).resolved(3)
    assert resolved["gradient_accumulation_steps"] == SourcedValue(4, "24 = 2 x 4 x 3 ranks")
    assert resolved["train_batch_size"] == SourcedValue(24, "config")
    params = {path.rpartition(".")[2] for path in resolved if path.startswith("scheduler.params.")}
    assert params == {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"}


def test_base64_is_read_as_json() -> None:
    """A configuration may come as base64 of its JSON; duplicate keys are refused there, too."""
    text = json.dumps({"seed": 5, "bf16": {"enabled": True}})
    config = Config.from_any(base64.b64encode(text.encode()).decode())
    assert (config.seed, config.bf16.enabled) == (5, True)
    assert config.sources()["seed"].source == "the base64 configuration"
    with pytest.raises(ConfigError, match="the base64 configuration: 'seed' is given twice, as 1 and as 2"):
        Config.from_any(base64.b64encode(b'{"seed": 1, "seed": 2}').decode())


@pytest.mark.parametrize(
    ("text", "value"), [("seed=3", 3), ("infinity.schedule=horizontal", "horizontal"), ('infinity.nvme=["/a"]', ["/a"])]
)
def test_set_parses_json_or_takes_a_string(text: str, value: object) -> None:
    """`--set` values are JSON where they are JSON, else strings."""
    key = text.partition("=")[0]
    assert Config.from_layers([set_layer(text)]).sources()[key] == SourcedValue(value, f"--set {key}")


def test_set_needs_a_key_and_a_value() -> None:
    """`--set` without `=` is an error with an example."""
    with pytest.raises(ConfigError, match="--set optimizer"):
        set_layer("seed")


def test_set_reaches_into_known_sections() -> None:
    """A dotted path below a known section without fields is taken as that section."""
    assert Config.from_layers([set_layer("tensorboard.enabled=true")]).notes()[0].startswith("tensorboard: has no effect")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"seed": 1, "seed": 2}', "'seed' is given twice, as 1 and as 2"),
        ('{"optimizer": {"params": {"lr": 1, "lr": 1}}}', "'lr' is given twice"),
        ('{"seed": 1,}', "line 1, column"),
        ("[1]", "holds list, not an object"),
        ("\x00", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, sentence: str) -> None:
    """Duplicate keys and files that are no JSON object are errors that name the file."""
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as caught:
        Config.from_any(path)
    assert str(path) in str(caught.value)


def test_missing_and_binary_files_are_refused(tmp_path: Path) -> None:
    """A file that cannot be read as text is an error that names it."""
    with pytest.raises(ConfigError, match="cannot read"):
        Config.from_any(str(tmp_path / "none.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read"):
        Config.from_any(tmp_path / "binary.json")


def test_a_config_is_returned_as_it_is_and_cannot_change() -> None:
    """`from_any` accepts a Config; a Config is frozen."""
    config = Config.from_any({"seed": 1})
    assert Config.from_any(config) is config
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 2
