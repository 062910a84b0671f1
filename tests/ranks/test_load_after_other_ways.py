"""State is put back while ranks know different ways through the units."""

from __future__ import annotations

from pathlib import Path

import pytest
from other_ways_errand import load_in_the_middle
from rank_pool import RankPool


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_checkpoint_is_loaded_though_ranks_go_other_ways(stage: int, ranks: RankPool, nvme: Path, tmp_path: Path) -> None:
    """C92: what stays is gathered in one order, not in each rank's own: no rank asks for another collective, same losses."""
    for once, again in ranks.run(2, load_in_the_middle, nvme=str(nvme), checkpoints=str(tmp_path / "saved"), stage=stage):
        assert once == again
