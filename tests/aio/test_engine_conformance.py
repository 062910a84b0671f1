"""What every engine does with every sort of file: the same suite for io_uring and threads, O_DIRECT and buffered."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable

import pytest
from aio_cases import Memory, open_kind, pipe_file

from infinity.aio.engine import Engine
from infinity.aio.files import DirectFile
from infinity.aio.request import Op, Request, RequestState, address_of
from infinity.errors import StorageError
from infinity.handles import AllOf

PAGE = 4096


def run(engine: Engine, *requests: Request) -> None:
    AllOf(engine.submit(requests)).wait()


@pytest.mark.parametrize("length", [512, PAGE, (1 << 16) - 512, 1 << 16, (1 << 16) + 512, (3 << 20) + 1536])
@pytest.mark.parametrize("offset", [0, 512, (1 << 20) - 512])
def test_aligned_round_trip(engine: Engine, file: DirectFile, length: int, offset: int) -> None:
    """C1: every block-aligned length at every block-aligned offset comes back bit for bit."""
    source, target = Memory(length), Memory(length)
    data = source.fill()
    run(engine, source.write(file, offset))
    run(engine, target.read(file, offset))
    assert target.map[:] == data
    assert os.fstat(file.fd).st_size == offset + length


@pytest.mark.parametrize("length", [1, 510, 513, 4097, (1 << 16) + 1, 288_241])
@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_buffered_files_take_any_length_and_offset(
    engine: Engine, open_file: Callable[..., DirectFile], length: int, offset: int
) -> None:
    """C1: without O_DIRECT any number of bytes goes to any offset, from any address, and nothing beside it changes."""
    file = open_file(direct=False)
    source, target = Memory(length + 3), Memory(length + 2)
    data = source.fill()
    run(engine, source.write(file, offset, start=3))
    run(engine, target.read(file, offset, start=1, length=length))
    assert target.map[:] == b"\0" + data[3:] + b"\0"


@pytest.mark.parametrize("offset", [(1 << 31) - PAGE, 1 << 31, (1 << 32) - PAGE, (1 << 32) + PAGE, 3 << 32])
def test_offsets_beyond_32_bits(engine: Engine, file: DirectFile, offset: int) -> None:
    """C11: a sparse file takes and returns bytes at offsets around and above 2^31 and 2^32, and only there."""
    source, target = Memory(3 * PAGE), Memory(3 * PAGE)
    data = source.fill()
    run(engine, source.write(file, offset))
    run(engine, target.read(file, offset))
    assert target.map[:] == data
    run(engine, target.read(file, offset & 0x7FFFFFFF if offset & 0x7FFFFFFF else PAGE))
    assert offset < 1 << 31 or target.map[:] == bytes(3 * PAGE)


def test_a_request_longer_than_2_to_the_32(kind: str, file: DirectFile) -> None:
    """C11: one request of more than 2^32 bytes is cut and counted in 64 bits: its error names the place and the rest.

    The file is empty, so that nothing is moved; the first four completions are made to look as if all had been.
    """
    block, length = 1 << 30, (1 << 32) + 5 * PAGE
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | 0x4000)  # MAP_NORESERVE: only the addresses
    engine = open_kind(kind, queue_depth=1, block_bytes=block, faults=dict.fromkeys(range(4), block))
    [handle] = engine.submit([Request(Op.READ, file, 0, address_of(memory), length, memory)])
    with pytest.raises(StorageError, match=f"of {5 * PAGE} bytes at offset {1 << 32} of .*end of file"):
        handle.wait()
    engine.close()


def test_a_thousand_small_requests(engine: Engine, file: DirectFile) -> None:
    """C15: many small requests in one submission all arrive at their own places."""
    memory = Memory(1000 * PAGE)
    data = memory.fill()
    run(engine, *[memory.write(file, i * PAGE, start=i * PAGE, length=PAGE) for i in range(1000)])
    back = Memory(1000 * PAGE)
    run(engine, *[back.read(file, i * PAGE, start=(999 - i) * PAGE, length=PAGE) for i in range(1000)])
    pages = [data[i * PAGE : (i + 1) * PAGE] for i in range(1000)]
    assert back.map[:] == b"".join(reversed(pages))


def test_concurrent_submitters(engine: Engine, file: DirectFile) -> None:
    """Threads that submit and wait at once neither lose nor mix up requests."""
    wrong: list[int] = []

    def work(number: int) -> None:
        memory, back = Memory(4 * PAGE), Memory(4 * PAGE)
        for turn in range(50):
            offset = (number * 50 + turn) * 4 * PAGE
            data = memory.fill()
            run(engine, memory.write(file, offset))
            run(engine, back.read(file, offset, length=PAGE), back.read(file, offset + PAGE, start=PAGE))
            if back.map[:] != data:
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_two_threads_wait_for_one_handle(engine: Engine, pipe_reads: None) -> None:
    """Every thread that waits for a handle is woken, and waiting again is fine."""
    file, writing = pipe_file()
    memory = Memory(1)
    [handle] = engine.submit([memory.read(file, 0)])
    woken = [threading.Thread(target=handle.wait) for _ in range(3)]
    for thread in woken:
        thread.start()
    assert not handle.done()
    os.write(writing, b"x")
    for thread in woken:
        thread.join(timeout=20)
    assert not any(thread.is_alive() for thread in woken)
    assert handle.done()
    handle.wait()
    assert memory.map[:] == b"x"
    file.close()
    os.close(writing)


def test_end_of_file(engine: Engine, file: DirectFile) -> None:
    """A read that the file is too short for fails, names the end of the file, and gives what there was."""
    source, target = Memory(PAGE), Memory(3 * PAGE)
    data = source.fill()
    run(engine, source.write(file, 0))
    os.truncate(file.fd, 1000)
    [handle] = engine.submit([target.read(file, 0)])
    with pytest.raises(StorageError, match=r"offset 1000 of .*end of file") as caught:
        handle.wait()
    assert caught.value.errno == 0
    assert target.map[:1000] == data[:1000]
    [beyond] = engine.submit([target.read(file, 1 << 33)])
    with pytest.raises(StorageError, match=f"offset {1 << 33} of .*end of file"):
        beyond.wait()


def test_a_closed_file(engine: Engine, file: DirectFile) -> None:
    """A request on a closed file fails with EBADF and names the path."""
    file.close()
    [handle] = engine.submit([Memory(PAGE).read(file, 0)])
    with pytest.raises(StorageError, match="file") as caught:
        handle.wait()
    assert caught.value.errno == errno.EBADF


def test_memory_that_is_not_there(engine: Engine, file: DirectFile) -> None:
    """A wild address is EFAULT, not a crash."""
    source = Memory(PAGE)
    run(engine, source.write(file, 0))
    [handle] = engine.submit([Request(Op.READ, file, 0, PAGE, PAGE, None)])
    with pytest.raises(StorageError) as caught:
        handle.wait()
    assert caught.value.errno == errno.EFAULT


@pytest.mark.parametrize(("offset", "start", "length"), [(1, 0, PAGE), (0, 1, PAGE), (0, 0, 513)])
def test_misaligned_direct_requests(
    engine: Engine, open_file: Callable[..., DirectFile], offset: int, start: int, length: int
) -> None:
    """A misaligned offset, address or length under O_DIRECT is EINVAL with the rule in the remedy, and moves nothing."""
    file, memory = open_file(direct=True), Memory(2 * PAGE)
    memory.fill()
    [handle] = engine.submit([memory.write(file, offset, start=start, length=length)])
    with pytest.raises(StorageError, match="multiples of 4096") as caught:
        handle.wait()
    assert caught.value.errno == errno.EINVAL
    assert os.fstat(file.fd).st_size == 0


@pytest.mark.parametrize(("offset", "length"), [(-PAGE, PAGE), (0, -PAGE), ((1 << 63) - PAGE, 2 * PAGE)])
def test_numbers_out_of_range(engine: Engine, file: DirectFile, offset: int, length: int) -> None:
    """Negative or overflowing places are EINVAL on the handle; requests beside them go on."""
    memory = Memory(PAGE)
    bad, good = engine.submit([memory.read(file, offset, length=length), memory.write(file, 0)])
    with pytest.raises(StorageError) as caught:
        bad.wait()
    assert caught.value.errno == errno.EINVAL
    good.wait()


def test_nothing_to_move(engine: Engine, file: DirectFile) -> None:
    """A request of no bytes is done, and so is a submission of no requests."""
    memory = Memory(PAGE)
    run(engine, memory.read(file, 0, length=0))
    assert engine.submit([]) == []


def test_states_of_a_request(engine: Engine, open_file: Callable[..., DirectFile], pipe_reads: None) -> None:
    """A request is SUBMITTED while the kernel has it, PARTIAL after a short completion, then DONE or FAILED."""
    file, writing = pipe_file()
    memory = Memory(2)
    [handle] = engine.submit([memory.read(file, 0)])

    def until(state: RequestState) -> None:
        for _ in range(2000):
            if handle.state is state:
                return
            time.sleep(0.01)
        pytest.fail(f"{handle.state} instead of {state}")

    until(RequestState.SUBMITTED)
    os.write(writing, b"a")
    until(RequestState.PARTIAL)
    assert not handle.done()
    os.write(writing, b"b")
    handle.wait()
    assert handle.state is RequestState.DONE
    assert memory.map[:] == b"ab"
    os.close(writing)
    [failing] = engine.submit([memory.read(file, 0)])
    with pytest.raises(StorageError):
        failing.wait()
    assert failing.state is RequestState.FAILED
    file.close()


def test_buffers_outlive_dropped_handles(kind: str, file: DirectFile) -> None:
    """The engine keeps a buffer alive although its handle and every other reference to it are gone."""
    engine = open_kind(kind, queue_depth=1)
    memory = Memory(1 << 20)
    data = memory.fill()
    engine.submit([memory.write(file, 0)])
    del memory
    gc.collect()
    back = Memory(1 << 20)
    while os.fstat(file.fd).st_size < 1 << 20:
        time.sleep(0.001)
    run(engine, back.read(file, 0))
    assert back.map[:] == data
    engine.close()


def test_finished_requests_let_go_of_their_buffers(engine: Engine, file: DirectFile) -> None:
    """C17: buffers of requests that went well do not pile up in the engine, even if nobody waits for the handles."""

    class Owner:
        pass

    memory, owners = Memory(PAGE), []
    run(engine, memory.write(file, 0))
    for _ in range(400):
        owner = Owner()
        owners.append(weakref.ref(owner))
        [handle] = engine.submit([Request(Op.READ, file, 0, memory.address, PAGE, owner)])
        while not handle.done():
            time.sleep(0.0001)
    del owner, handle
    gc.collect()
    assert sum(reference() is not None for reference in owners) < 200
