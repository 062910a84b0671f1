"""What a script of ZeRO's users does before `initialize`: its command-line options, and joining the other ranks."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from infinity.comm.launched import launched_ranks
from infinity.config import Config
from infinity.errors import ConfigError

GivenConfig = Config | Mapping[str, object] | str | Path


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config, as `initialize(args=...)` reads them; return the parser."""
    group = parser.add_argument_group("infinity", "training with infinity")
    group.add_argument("--deepspeed", action="store_true", help="train with infinity (the script decides what that means)")
    group.add_argument("--deepspeed_config", default=None, help="path of the JSON configuration")
    return parser


def init_distributed(dist_backend: str | None = None) -> None:
    """Check what the launcher says; `initialize` joins the other ranks. Raises ConfigError for what is no number."""
    launched_ranks()


def given_config(
    config: GivenConfig | None, config_params: GivenConfig | None, args: Namespace | object | None
) -> GivenConfig | None:
    """Return the configuration that was given in one of its places. Raises ConfigError where it was in two."""
    places = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    given = {place: value for place, value in places.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(f"The configuration is given twice: as {' and as '.join(given)}.", remedy="Give it once.")
    return next(iter(given.values()), None)
