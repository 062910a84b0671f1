"""The section `zero_optimization`: what is partitioned over ranks and in which tier it lives."""

from __future__ import annotations

from typing import Literal

from infinity.config.section import Directories, Section, Share, WholeNumber

Device = Literal["auto", "none", "gpu", "cpu", "nvme"]  # none is DeepSpeed's word for gpu; auto lets the planner choose
Stage = Literal[0, 1, 2, 3]


class OffloadOptimizerSection(Section):
    """`zero_optimization.offload_optimizer`: where master weights and moments live."""

    device: Device = "auto"
    nvme_path: Directories = ()
    pin_memory: bool = True
    ratio: Share = 1.0  # share that is offloaded; the rest stays on the compute tier


class OffloadParamSection(Section):
    """`zero_optimization.offload_param`: where the compute weights live."""

    device: Device = "auto"
    nvme_path: Directories = ()
    pin_memory: bool = True


class ZeroSection(Section):
    """`zero_optimization`."""

    stage: Stage | None = None  # None: the lowest of those that offload least
    param_persistence_threshold: WholeNumber = 0  # elements; in stage 3 units of parameters of at most so many stay whole
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection()
    offload_param: OffloadParamSection = OffloadParamSection()
