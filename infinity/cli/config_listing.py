"""The resolved configuration as a listing: every key that counts, its value, and where that comes from."""

from __future__ import annotations

import json

from rich.text import Text

from infinity.cli.console import open_console
from infinity.config import Config


def show_config(config: Config, *, world_size: int) -> None:
    """Print one line a key, and a line for each key that has no effect. Raises ConfigError for a contradictory batch."""
    console = open_console()
    resolved = config.resolved(world_size)
    width = max(map(len, resolved))
    for path, (value, source) in resolved.items():
        shown = "left to the program" if value is None else json.dumps(value)
        console.print(Text(f"{path:<{width}}  {shown}  ({source})"), soft_wrap=True)
    for note in config.notes():
        console.print(Text(note), soft_wrap=True)
