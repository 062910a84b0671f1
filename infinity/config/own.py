"""The section `infinity`: what DeepSpeed has no key for."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from infinity.byte_sizes import MIB
from infinity.config.section import Count, Directories, GradDtype, Section, Size, Words


class InfinitySection(Section):
    """`infinity`; None means that the planner chooses, and is written "auto" in a file."""

    nvme: Directories = ()  # directories for whatever lives on NVMe
    cpu_memory: Size | None = None  # bytes per node
    gpu_memory: Size | None = None  # bytes per GPU
    schedule: Literal["vertical", "horizontal"] = "vertical"
    gradient_reduction: Literal["boundary", "micro_batch"] | None = None  # over ranks: once a step, or each micro-batch
    tile_bytes: Size = 8 * MIB  # optimizer state per tile
    tile_slots: Annotated[Count, Field(ge=2)] | None = None  # buffers that tiles stream through
    weight_slots: Annotated[Count, Field(ge=2)] | None = None  # buffers for gathered units
    engine: Literal["auto", "uring", "threads", "buffered"] = "auto"
    adam_threads: Count | None = None  # of the optimizer's kernel; None: this rank's share of the cores
    io_policy: Literal["mixed", "burst"] = "mixed"
    grad_dtype: GradDtype | None = None  # None: that of the weights
    max_skipped_in_a_row: Count = 32  # steps without a finite gradient and with one loss scale; after them the run stops
    check: bool = False  # compare every rerun's outputs with the first run's, in bits
    checksums: bool = True  # compare what is read from swap files with the CRC32C of what was written
    recompute: bool = False  # rerun also the units whose weights are resident
    units: Words = ()  # class names or name patterns of the modules that are units; empty: found by structure
    deterministic: bool = False
