"""Builds infinity._aio, the io_uring engine in this directory, with cffi in API mode.

liburing is linked statically where a position-independent liburing.a is found, so that a built wheel needs nothing on the
machine it is installed on; otherwise the shared library. `find_liburing` returns None where there is neither.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from cffi import FFI

_SOURCES = ("csrc/aio/engine.c", "csrc/aio/registered.c", "csrc/aio/ring.c")  # relative to the root, where setup.py runs

_DECLARATIONS = """
#define AIO_END_OF_FILE -4096
#define AIO_MAX_QUEUE_DEPTH 4096
#define AIO_MAX_BLOCK_BYTES 1073741824
#define AIO_NO_TICKET -1

enum { AIO_QUEUED, AIO_SUBMITTED, AIO_PARTIAL, AIO_DONE, AIO_FAILED };
enum { AIO_NOT_YET, AIO_OVER, AIO_ALL_OVER };

typedef struct aio_engine aio_engine;
typedef struct {
    int32_t fd;
    int32_t ticket;
    int32_t writes;
    int32_t granule_bytes;
    int64_t offset;
    uint64_t address;
    int64_t length;
} aio_operation;
typedef struct aio_request {
    aio_operation operation;
    int32_t state;
    int32_t code;
    int64_t failed_offset;
    int64_t latency_nanoseconds;
    ...;
} aio_request;
typedef struct {
    uint64_t completion;
    int32_t result;
} aio_fault;

int aio_open(uint32_t queue_depth, uint32_t block_bytes, const aio_fault *faults, uint32_t num_faults, aio_engine **engine);
int aio_submit(aio_engine *engine, aio_request *requests, uint32_t count);
int aio_wait(aio_engine *engine, aio_request *requests, uint32_t count, uint32_t index, uint32_t timeout_milliseconds);
uint32_t aio_next_failure(const aio_request *requests, uint32_t count, uint32_t from);
int aio_register_file(aio_engine *engine, int32_t fd, int32_t *ticket);
int aio_unregister_file(aio_engine *engine, int32_t ticket);
int aio_register_memory(aio_engine *engine, uint64_t address, uint64_t num_bytes);
int aio_unregister_memory(aio_engine *engine, uint64_t address, uint64_t num_bytes);
void aio_close(aio_engine *engine);
void aio_free(aio_engine *engine);
"""

_TRIAL = """
#include <liburing.h>
int trial(struct io_uring *ring, struct io_uring_sync_cancel_reg *what)
{
    return io_uring_queue_init(1, ring, IORING_SETUP_DEFER_TASKRUN) + io_uring_register_sync_cancel(ring, what);
}
"""


def find_liburing() -> tuple[str, ...] | None:
    """Return the linker arguments for liburing 2.3 or newer, found by linking a trial library; None where there is none."""
    archive = _print_file_name("liburing.a")
    candidates = ([(archive,)] if archive else []) + [("-luring",)]
    return next((arguments for arguments in candidates if _links(arguments)), None)


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC", "cc"))


def _run(arguments: list[str]) -> subprocess.CompletedProcess[str] | None:
    """Run the compiler; None where it cannot be started."""
    try:
        return subprocess.run([*_compiler(), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None


def _print_file_name(library: str) -> str | None:
    result = _run([f"-print-file-name={library}"])
    path = Path(result.stdout.strip()) if result else Path()
    return str(path.resolve()) if path.is_absolute() else None


def _links(arguments: tuple[str, ...]) -> bool:
    flags = [*shlex.split(os.environ.get("CFLAGS", "")), *shlex.split(os.environ.get("LDFLAGS", ""))]
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "trial.c"
        source.write_text(_TRIAL)
        output = str(source.with_suffix(".so"))
        result = _run(["-shared", "-fPIC", "-Wl,-z,defs", "-o", output, str(source), *flags, *arguments])
    return result is not None and result.returncode == 0


def _builder() -> FFI:
    builder = FFI()
    builder.cdef(_DECLARATIONS)
    builder.set_source(
        "infinity._aio",
        '#include "aio.h"',
        sources=list(_SOURCES),
        include_dirs=["csrc/aio"],
        depends=["csrc/aio/aio.h", "csrc/aio/engine.h"],
        extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-pthread"],
        extra_link_args=["-pthread", *(find_liburing() or ())],
    )
    return builder


ffibuilder = _builder()
