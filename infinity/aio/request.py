"""One read or write, and the states it goes through in every engine."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from enum import Enum, IntEnum

from infinity.aio.failures import storage_error
from infinity.aio.files import DirectFile
from infinity.errors import StorageError


class Op(Enum):
    """The direction of a request, seen from the program."""

    READ = "read"
    WRITE = "write"


class RequestState(IntEnum):
    """Where a request is; the numbers are those of csrc/aio/aio.h."""

    QUEUED = 0  # the engine has it, the kernel has nothing of it
    SUBMITTED = 1  # the kernel has had at least one piece of it
    PARTIAL = 2  # a piece came back short, its rest was submitted again
    DONE = 3  # every byte was moved
    FAILED = 4  # something of it failed, nothing of it is at the kernel


REQUEST_MOVES = {
    RequestState.QUEUED: (RequestState.SUBMITTED, RequestState.DONE, RequestState.FAILED),  # DONE: no bytes to move
    RequestState.SUBMITTED: (RequestState.PARTIAL, RequestState.DONE, RequestState.FAILED),
    RequestState.PARTIAL: (RequestState.PARTIAL, RequestState.DONE, RequestState.FAILED),
    RequestState.DONE: (),
    RequestState.FAILED: (),
}


@dataclass(slots=True)
class Request:
    """Move `length` bytes between `offset` in the file and `address` in memory. Not to be changed once it is made.

    It is not frozen, because making a frozen one takes longer than submitting it and waiting for it.

    `keep` owns the memory at `address`; the engine and the handle hold it until the request is over. Under O_DIRECT
    address, offset and length are multiples of the logical block (4,096 always serves).
    """

    op: Op
    file: DirectFile
    offset: int
    address: int
    length: int
    keep: object


def request_error(request: Request, code: int, failed_offset: int) -> StorageError:
    """Return the error of a request that failed with -errno or END_OF_FILE at `failed_offset` of its file."""
    end = request.offset + request.length
    return storage_error(request.op.value, request.file.path, code, offset=failed_offset, length=max(end - failed_offset, 0))


def address_of(memory: mmap.mmap | bytearray) -> int:
    """Return the address of a writable buffer's first byte; the caller keeps the buffer alive and as long as it is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
