"""The ways of an Adam update: which arrays each has, of which dtype, and how many bytes it moves for a parameter."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.optim.kernel import AdamArrays, MasterFormat
from infinity.store.layout import ELEMENT_BYTES


@dataclass(frozen=True, slots=True)
class Stream:
    """One array of an update."""

    name: str  # a field of AdamArrays
    dtype: str
    is_read: bool = True
    is_written: bool = True

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]


_MOMENTS = (Stream("exp_avg", "float32"), Stream("exp_avg_sq", "float32"))


@dataclass(frozen=True, slots=True)
class AdamPath:
    """One way of an update."""

    name: str
    master: MasterFormat
    grad_dtype: str
    streams: tuple[Stream, ...]

    @property
    def bytes_moved(self) -> int:
        """Bytes that are read and written for one parameter."""
        return sum(stream.element_bytes * (stream.is_read + stream.is_written) for stream in self.streams)

    @property
    def bytes_held(self) -> int:
        """Bytes of memory for one parameter."""
        return sum(stream.element_bytes for stream in self.streams)

    def offset(self, name: str, num_parameters: int) -> int:
        """Return where the stream `name` starts in a buffer that holds the streams one after the other."""
        offset = 0
        for stream in self.streams:
            if stream.name == name:
                return offset
            offset += stream.element_bytes * num_parameters
        raise KeyError(name)

    def arrays(self, address: int, num_parameters: int) -> AdamArrays:
        """Return the addresses in such a buffer."""
        at = {stream.name: address + self.offset(stream.name, num_parameters) for stream in self.streams}
        return AdamArrays(**at)


def _path(name: str, master: MasterFormat, grad_dtype: str, *streams: Stream) -> AdamPath:
    return AdamPath(name, master, grad_dtype, (*streams, *_MOMENTS, Stream("grad", grad_dtype, is_written=False)))


PATHS = (
    _path("fp32", MasterFormat.FP32, "float32", Stream("weights", "float32")),
    _path("bf16_split", MasterFormat.SPLIT_BF16, "bfloat16", Stream("weights", "bfloat16"), Stream("low", "int16")),
    _path(
        "fp32_out_bf16", MasterFormat.FP32_OUT_BF16, "bfloat16",
        Stream("weights", "float32"), Stream("out", "bfloat16", is_read=False),
    ),
    _path(
        "fp32_out_fp16", MasterFormat.FP32_OUT_FP16, "float16",
        Stream("weights", "float32"), Stream("out", "float16", is_read=False),
    ),
)  # fmt: skip
