"""The pictures of `bench nvme`, and what is said where they cannot be drawn."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from bench_fakes import some_row

from infinity.bench import plots
from infinity.errors import ConfigError, PlatformError

ROWS = [
    some_row(op, engine, block, depth, 1e9 * (index + 1))
    for index, (op, engine, block, depth) in enumerate(
        (op, engine, block, depth)
        for op in ("read", "write", "mixed")
        for engine in ("uring", "fio:io_uring")
        for block in (4096, 1 << 20)
        for depth in (16, 32)
    )
]


def test_the_heat_map_has_a_cell_for_every_block_and_depth() -> None:
    """Blocks go up, depths go right, in GB/s; a cell that was not measured is NaN."""
    rows = [some_row("read", "uring", 8192, 32, 3e9), some_row("read", "uring", 4096, 16, 1e9)]
    blocks, depths, rates = plots.heat_map(rows)
    assert (blocks, depths) == ([4096, 8192], [16, 32])
    assert rates[0][0] == 1.0
    assert rates[1][1] == 3.0
    assert math.isnan(rates[0][1])


def test_without_matplotlib_the_error_has_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is the command that installs it; another kind of file is refused by name."""
    monkeypatch.setattr(plots, "Figure", None)
    with pytest.raises(PlatformError) as error:
        plots.require_plotting(Path("a.png"))
    assert "pip install 'infinity-train[plot]'" in error.value.remedy
    with pytest.raises(ConfigError, match=r"a\.jpg"):
        plots.require_plotting(Path("a.jpg"))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    """The file is a PNG of some size."""
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    path = tmp_path / "nvme.png"
    plots.require_plotting(path)
    plots.plot_nvme(path, ROWS)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000
