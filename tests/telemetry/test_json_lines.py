"""Lines of JSON: appended, flushed, repaired after a crash, cut back to a step."""

import json
from pathlib import Path

import pytest

from infinity.errors import StorageError
from infinity.telemetry.jsonl import JsonLines, open_jsonl, read_jsonl


def records(*steps: int) -> list[dict[str, object]]:
    """Return one record a step."""
    return [{"step": step, "loss": step / 4} for step in steps]


def test_a_line_is_in_the_file_when_append_returns(tmp_path: Path) -> None:
    """A reader beside the run sees every finished line, and a second opening goes on where the first ended."""
    path = tmp_path / "metrics.jsonl"
    with open_jsonl(path) as lines:
        for number, record in enumerate(records(1, 2), start=1):
            lines.append(record)
            assert len(path.read_text().splitlines()) == number
    with open_jsonl(path) as lines:
        lines.append({"step": 3, "loss": 0.75})
    assert read_jsonl(path) == records(1, 2, 3)


def test_numbers_that_json_does_not_have_become_null(tmp_path: Path) -> None:
    """NaN and infinities are null wherever they stand, so that every reader takes the file."""
    path = tmp_path / "metrics.jsonl"
    with open_jsonl(path) as lines:
        lines.append({"loss": float("nan"), "losses": (1.5, float("inf")), "rates": {"read": -float("inf")}, "note": "NaN"})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "loss": None,
        "losses": [1.5, None],
        "rates": {"read": None},
        "note": "NaN",
    }


def test_resume_cuts_back_to_its_step_and_goes_on(tmp_path: Path) -> None:
    """What a killed run wrote after the checkpoint is dropped, and the file continues without a gap or a repeat."""
    path = tmp_path / "metrics.jsonl"
    with open_jsonl(path) as lines:
        lines.append({"run": "first"})
        for record in records(1, 2, 3, 4, 5):
            lines.append(record)
        assert lines.truncate_after(9) == 0
        assert lines.truncate_after(3) == 2
        assert read_jsonl(path) == [{"run": "first"}, *records(1, 2, 3)]
        lines.append(records(4)[0])
    assert read_jsonl(path) == [{"run": "first"}, *records(1, 2, 3, 4)]
    with open_jsonl(path) as lines:
        assert lines.truncate_after(0) == 4
    assert read_jsonl(path) == [{"run": "first"}]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"\0" * 4096, b"{"])
def test_a_line_torn_by_a_crash_is_dropped(tmp_path: Path, torn: bytes) -> None:
    """What a crash left of the last line goes when the file is opened, and readers leave it out before that."""
    path = tmp_path / "metrics.jsonl"
    with open_jsonl(path) as lines:
        for record in records(1, 2):
            lines.append(record)
    with path.open("ab") as file:
        file.write(torn)
    assert read_jsonl(path) == records(1, 2)
    with open_jsonl(path) as lines:
        lines.append(records(3)[0])
    assert read_jsonl(path) == records(1, 2, 3)


@pytest.mark.parametrize("foreign", ["not json\n", "[1, 2]\n"])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, foreign: str) -> None:
    """Whole lines that are no objects are somebody else's: an error names line and file, and nothing is cut."""
    path = tmp_path / "notes.txt"
    path.write_text('{"step": 1}\n' + foreign)
    with open_jsonl(path) as lines, pytest.raises(StorageError, match=r"notes\.txt"):
        lines.truncate_after(0)
    with pytest.raises(StorageError, match=r"notes\.txt"):
        read_jsonl(path)
    assert path.read_text() == '{"step": 1}\n' + foreign


def test_errors_of_the_disk_name_the_file_and_the_system_error(tmp_path: Path) -> None:
    """A missing directory and a full disk are storage errors with the system's number."""
    with pytest.raises(StorageError, match=r"missing/metrics\.jsonl: No such file") as caught:
        open_jsonl(tmp_path / "missing" / "metrics.jsonl")
    assert caught.value.errno == 2
    full = Path("/dev/full")
    with pytest.raises(StorageError, match="append to /dev/full: No space left") as caught:
        JsonLines(full, full.open("wb")).append({"step": 1})
    assert caught.value.errno == 28
