"""What the trials answer with. Plain values, so that the process that asks loads none of what they try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from infinity.byte_sizes import MIB
from infinity.doctor.trials import Refusal

IO_BUFFER_BYTES = 64 * MIB  # about what a small run reads and writes through, and would have io_uring register


@dataclass(frozen=True, slots=True)
class ModuleAnswer:
    """A module that loads, and its file."""

    path: str


@dataclass(frozen=True, slots=True)
class KernelAnswer:
    """The instruction sets of the Adam kernel that this CPU can run, the fastest first, and the one that training takes."""

    names: Sequence[str]
    chosen: str
    num_threads: int


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """Which I/O engine serves in a directory, found by one write and read, and what it could register."""

    engine: str
    direct: bool  # whether O_DIRECT is in force
    uring_refusal: Refusal | None  # why it is not io_uring
    registered_files: bool
    registered_buffers: bool
    buffer_bytes: int  # how much memory was given to register
    registration_notes: Sequence[str]


@dataclass(frozen=True, slots=True)
class DirectoryAnswer:
    """A directory that takes swap files."""

    path: str  # absolute, links resolved
    is_new: bool  # it was made for the trial and is removed again
    device: str  # "major:minor" of its file system
    is_memory: bool
    free_bytes: int  # for this user
    free_inodes: int | None  # None where the file system has no fixed number of them
    io: EngineAnswer


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A CUDA device that torch shows."""

    name: str
    total_bytes: int
    capability: str  # "9.0"


@dataclass(frozen=True, slots=True)
class TorchAnswer:
    """What torch is and what it computes on."""

    version: str
    cuda_build: str  # the CUDA that it was built with; "" for a build without
    num_threads: int
    bf16_error: str  # of a bf16 matrix product on the CPU; "" where it worked
    devices: Sequence[CudaDevice]
    cuda_error: str  # of a small sum on the first device; "" where it worked or there is none
    warnings: Sequence[str]  # said by torch while it looked for devices


def read_directory_answer(values: Mapping[str, Any]) -> DirectoryAnswer:
    """Return the answer that was carried over as JSON."""
    io = values["io"]
    refusal = io["uring_refusal"]
    engine = EngineAnswer(**{**io, "uring_refusal": Refusal(**refusal) if refusal else None})
    return DirectoryAnswer(**{**values, "io": engine})


def read_torch_answer(values: Mapping[str, Any]) -> TorchAnswer:
    """Return the answer that was carried over as JSON."""
    return TorchAnswer(**{**values, "devices": tuple(CudaDevice(**device) for device in values["devices"])})
