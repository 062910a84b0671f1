"""The configurations of the incumbent's public guides train as they are, over two ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from guide_errand import loop_of_a_guide
from rank_pool import RankPool

sys.path.append(str(Path(__file__).resolve().parents[1] / "config"))
from test_config_deepspeed import GUIDES


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guides_configuration_trains_over_two_ranks(guide: str, ranks: RankPool, nvme: Path) -> None:
    """Stage 2 with overlap and buckets, stage 3 on CPU and NVMe, fp16 with dynamic scale, WarmupDecayLR: ranks agree."""
    first, second = ranks.run(2, loop_of_a_guide, values=GUIDES[guide], nvme=str(nvme))
    assert first == second
    asked = GUIDES[guide]["zero_optimization"]
    assert isinstance(asked, dict)
    assert first["stage"] == asked["stage"]
    assert None not in first["norms"]
    assert first["skipped"] == 0
    assert first["moved"] == len(first["weights"])
