"""Run as a program: denies io_uring_setup with errno argv[1], then probes directory argv[2] and moves bytes in it."""

from __future__ import annotations

import ctypes
import json
import struct
import sys
from pathlib import Path

from aio_cases import Memory

from infinity.aio.files import open_direct
from infinity.aio.select import open_engine, probe
from infinity.errors import PlatformError

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
BPF_LOAD_NUMBER, BPF_JUMP_EQUAL, BPF_RETURN = 0x20, 0x15, 0x06
RETURN_ALLOW, RETURN_ERRNO = 0x7FFF0000, 0x00050000
IO_URING_SETUP = 425  # on every architecture


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def deny(number: int) -> None:
    """Make io_uring_setup fail with `number` in this process from now on."""
    code = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in [
            (BPF_LOAD_NUMBER, 0, 0, 0),
            (BPF_JUMP_EQUAL, 0, 1, IO_URING_SETUP),
            (BPF_RETURN, 0, 0, RETURN_ERRNO | number),
            (BPF_RETURN, 0, 0, RETURN_ALLOW),
        ]
    )
    libc, program = ctypes.CDLL(None, use_errno=True), Program(len(code) // 8, code)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program)):
        sys.exit(f"no seccomp here: errno {ctypes.get_errno()}")


def main() -> None:
    """Answer what the probe and the engines do under the filter."""
    deny(int(sys.argv[1]))
    directory = Path(sys.argv[2])
    found = probe(directory)
    engine, file = open_engine("auto"), open_direct(directory / "file", create=True)
    memory, back = Memory(1 << 20), Memory(1 << 20)
    data = memory.fill()
    engine.submit([memory.write(file, 0)])[0].wait()
    engine.submit([back.read(file, 0)])[0].wait()
    engine.close()
    file.close()
    try:
        open_engine("uring")
        refusal = ""
    except PlatformError as error:
        refusal = str(error)
    answer = {
        "probed": found.engine, "notes": found.notes, "engine": engine.name,
        "same": back.map[:] == data, "refusal": refusal,
    }  # fmt: skip
    print(json.dumps(answer))


main()
