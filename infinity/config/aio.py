"""The section `aio`: how files are read and written."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from infinity.byte_sizes import MIB, PAGE_BYTES
from infinity.config.section import Count, Section, Size


def _whole_pages(num_bytes: int) -> int:
    if num_bytes % PAGE_BYTES:
        raise ValueError(f"should be a multiple of {PAGE_BYTES} bytes")
    return num_bytes


class AioSection(Section):
    """`aio`: requests are split into `block_size` bytes, `queue_depth` of them are in flight."""

    block_size: Annotated[Size, AfterValidator(_whole_pages)] = MIB
    queue_depth: Count = 32
