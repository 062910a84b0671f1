"""Write infinity/config/schema.json, the JSON schema of a configuration file, from the sections; a test compares it."""

from __future__ import annotations

import json
from pathlib import Path

from infinity.config.json_schema import build_json_schema

SCHEMA_FILE = Path(__file__).parents[1] / "infinity" / "config" / "schema.json"


def main() -> None:
    """Write the file."""
    SCHEMA_FILE.write_text(json.dumps(build_json_schema(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
