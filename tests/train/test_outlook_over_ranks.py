"""`infinity plan` foretells over several ranks what each rank's training would plan."""

from __future__ import annotations

import pytest
import torch

from infinity.byte_sizes import GIB
from infinity.comm.launched import Ranks
from infinity.config import Config
from infinity.engine.cut import cut
from infinity.engine.planned import ActivationSizes, plan_for
from infinity.memory.device import host_device
from infinity.models.gpt import build_meta_gpt
from infinity.models.presets import PRESETS, block_kept_bytes
from infinity.models.shapes import preset_shape
from infinity.placement import Placement, Schedule
from infinity.placement.stages import PARTITIONED
from infinity.train.activation_budget import activation_budget_bytes
from infinity.train.outlook import Question, look_ahead

PRESET, SEQ_LEN, MICRO_BATCH_SIZE, A = "gpt-1m", 32, 2, 4


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_plans_what_was_foretold(num_ranks: int, schedule: Schedule) -> None:
    """Of the model itself each rank gets the same plan as of its shapes, in every stage, but for the words (C43)."""
    gpt = PRESETS[PRESET]
    config = Config.from_any({
        "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE, "gradient_accumulation_steps": A,
        "infinity": {"schedule": schedule.value, "cpu_memory": GIB},
    })  # fmt: skip
    kept = block_kept_bytes(gpt, micro_batch_size=MICRO_BATCH_SIZE, seq_len=SEQ_LEN, dtype_bytes=2)
    activations = ActivationSizes(
        activation_budget_bytes(
            gpt, micro_batch_size=MICRO_BATCH_SIZE, seq_len=SEQ_LEN, num_micro_batches=A, schedule=schedule, dtype_bytes=2
        ),
        lambda unit: kept if unit.startswith("blocks.") else 0,
    )
    foretold = look_ahead(
        Question(
            shape=preset_shape(PRESET),
            precision="bf16",
            num_ranks=num_ranks,
            stages=tuple(PARTITIONED),
            placement=Placement(),
            micro_batch_size=MICRO_BATCH_SIZE,
            num_micro_batches=A,
            seq_len=SEQ_LEN,
            schedule=schedule,
            has_gpu=False,
            gpu_memory_bytes=None,
            cpu_memory_bytes=GIB,
            nvme_bytes=None,
        )
    ).stages
    model = build_meta_gpt(gpt, torch.bfloat16)
    for stage in PARTITIONED:
        for rank in range(num_ranks):
            ranks = Ranks(global_rank=rank, local_rank=rank, world_size=num_ranks, local_world_size=num_ranks)
            pieces = cut(model, config, lambda _: 0, stage=stage, ranks=ranks)
            plan = plan_for(pieces, config, Placement(stage=stage), host_device(), activations, ranks)
            assert plan == foretold[stage].plan
            assert dict(plan.budgets) == {plan.compute_tier: GIB // num_ranks}
