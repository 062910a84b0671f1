"""`infinity train --nvme A --nvme B` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from test_cli_failures import infinity


def test_two_directories_from_the_command_line(tmp_path: Path) -> None:
    """C147: a run over two directories says rates and shares before, what was moved after, and leaves nothing there."""
    (tmp_path / "text").write_bytes(bytes((i * i + 7) % 251 for i in range(5000)))
    answer = infinity(
        "train", "--model", "gpt-1m", "--steps", 2, "--seq-len", 24, "--micro-batch-size", 1, "--data", "text",
        "--nvme", "a", "--nvme", "b", "--offload-optimizer", "nvme", "--offload-params", "nvme", "--cpu-memory", "512MiB",
        "--output", "out", cwd=tmp_path,
    )  # fmt: skip
    assert answer.code == 0, answer
    said = " ".join(answer.out.split())
    for name in ("a", "b"):
        assert f"nvme {tmp_path / name}" in said
        assert list((tmp_path / name).iterdir()) == []
    assert "reads " in said
    assert "/s over the steps (of " in said
    assert "at the rates measured before)" in said
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert [line["directory"] for line in plan["directories"]] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert all(line["num_bytes"] > 0 and line["read_bytes_per_second"] > 0 for line in plan["directories"])
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["nvme_bytes_per_second"] > 0
    assert summary["nvme_predicted_bytes_per_second"] > 0


def test_one_directory_in_two_spellings_is_explained(tmp_path: Path) -> None:
    """A link to the directory beside it: one sentence with both, exit code 2, nothing made; twice the same is a note."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "text").write_bytes(b"some text" * 100)
    answer = infinity("train", "--data", "text", "--nvme", "disk", "--nvme", "link", cwd=tmp_path)
    assert answer.code == 2
    assert "NVMe directories disk and link are one and the same" in " ".join(answer.err.split())
    assert list((tmp_path / "disk").iterdir()) == []
    assert not (tmp_path / "runs").exists()
