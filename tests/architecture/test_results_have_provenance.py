"""Every published number says how it was made."""

import json
from pathlib import Path

import pytest

RESULTS = sorted((Path(__file__).resolve().parents[2] / "bench" / "results").glob("*.json"))
REQUIRED = {"command", "commit", "versions", "hardware"}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results_have_provenance(path: Path) -> None:
    """A results file has the command, commit, versions and hardware it comes from, none of them empty."""
    provenance = json.loads(path.read_text())["provenance"]
    assert provenance.keys() >= REQUIRED
    assert all(provenance[key] for key in REQUIRED)
