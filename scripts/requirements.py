"""Print requirement lists of pyproject.toml, one a line: build, runtime, or the name of an extra."""

import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def requirements(kind: str) -> list[str]:
    """Return the requirements of `kind`: "build", "runtime" or an optional-dependencies key."""
    table = tomllib.loads(PYPROJECT.read_text())
    if kind == "build":
        return list(table["build-system"]["requires"])
    if kind == "runtime":
        return list(table["project"]["dependencies"])
    return list(table["project"]["optional-dependencies"][kind])


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for kind in sys.argv[1:] for line in requirements(kind))
