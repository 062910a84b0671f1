"""The streaming safetensors writer and reader: round trips, the library in both directions, limits, truncation, memory."""

from __future__ import annotations

import json
import mmap
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity.checkpoint.header import MAX_JSON_BYTES, build_header, parse_header
from infinity.checkpoint.sources import host_bytes
from infinity.checkpoint.specs import DTYPES, TensorSpec
from infinity.checkpoint.stream import StreamReader, open_stream_reader, open_stream_writer
from infinity.errors import CheckpointError, CheckpointIncomplete, StorageError

# Odd byte sizes first, so that alignment has to be taken care of.
TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "half": torch.tensor([1.5, -0.0, float("inf")], dtype=torch.bfloat16),
    "scalar": torch.tensor(3.25, dtype=torch.float32),
    "one": torch.tensor([[7]], dtype=torch.int64),
    "empty": torch.empty((0, 4), dtype=torch.float16),
    "low": torch.arange(-9, 9, dtype=torch.int16).reshape(3, 6),
    "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "nan": torch.tensor([float("nan")], dtype=torch.float32),
    "eighth": torch.tensor([1.0, -2.0], dtype=torch.float8_e4m3fn),
    "complex": torch.tensor([1 + 2j], dtype=torch.complex64),
}


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], piece: int = 2) -> None:
    specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
    with open_stream_writer(path, specs, {"format": "pt"}) as writer:
        for spec in specs:
            flat = tensors[spec.name].reshape(-1)
            for first in reversed(range(0, spec.numel, piece)):  # any order is allowed
                writer.write(spec.name, first, host_bytes(spec, flat[first : first + piece]))
        writer.finish()


def read_tensor(reader: StreamReader, name: str) -> torch.Tensor:
    spec = reader.spec(name)
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    reader.read(name, 0, spec.numel, host_bytes(spec, tensor))
    return tensor


def require_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.contiguous().reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist()


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    """Every dtype, 0-dim, one-element and empty tensors arrive in safetensors.torch with their bits (C1's odd sizes)."""
    write_tensors(tmp_path / "ours", TENSORS)
    found = safetensors.torch.load_file(tmp_path / "ours")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        require_same_bits(found[name], tensor)
    with safetensors.safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    """A file of the safetensors library opens with its specs, metadata and bits."""
    safetensors.torch.save_file(TENSORS, tmp_path / "theirs", {"who": "library"})
    with open_stream_reader(tmp_path / "theirs") as reader:
        assert reader.metadata == {"who": "library"}
        assert {spec.name for spec in reader.specs} == TENSORS.keys()
        for name, tensor in TENSORS.items():
            require_same_bits(read_tensor(reader, name), tensor)


def test_a_range_is_read_at_any_element(tmp_path: Path) -> None:
    """Elements 5 to 11 of a tensor are read without the others."""
    write_tensors(tmp_path / "file", TENSORS)
    with open_stream_reader(tmp_path / "file") as reader:
        into = np.zeros(6, dtype=np.int16)
        reader.read("low", 5, 6, host_bytes(reader.spec("low"), into))
        assert into.tolist() == [-4, -3, -2, -1, 0, 1]


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    )
)
@settings(max_examples=80, deadline=None)
def test_a_header_reads_back_as_it_was_built(entries: dict[str, tuple[str, list[int]]]) -> None:
    """For any names, dtypes and shapes the parsed header equals the built one, aligned and without holes."""
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, (dtype, shape) in entries.items()]
    built = build_header(specs, {"a": "b"})
    assert parse_header(built.encoded, where="file") == built
    assert all(extent.offset % extent.spec.element_bytes == 0 for extent in built.extents.values())
    assert built.file_bytes == len(built.encoded) + sum(spec.num_bytes for spec in specs)


@pytest.mark.parametrize("kept", [0, 7, 8, 40, -1])
def test_a_truncated_file_names_expected_and_found_bytes(tmp_path: Path, kept: int) -> None:
    """A file cut anywhere is CheckpointIncomplete with its name, the expected and the found length."""
    path = tmp_path / "cut.safetensors"
    write_tensors(path, TENSORS)
    found = kept if kept >= 0 else path.stat().st_size - 1
    os.truncate(path, found)
    with pytest.raises(CheckpointIncomplete, match=rf"cut\.safetensors is truncated: expected \d+ bytes, found {found}\."):
        open_stream_reader(path)


def test_a_file_with_more_bytes_than_its_header_names_is_refused(tmp_path: Path) -> None:
    """Bytes behind the last tensor are an error with both lengths."""
    write_tensors(tmp_path / "long", TENSORS)
    size = (tmp_path / "long").stat().st_size
    with (tmp_path / "long").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match=f"too long: expected {size} bytes, found {size + 1}"):
        open_stream_reader(tmp_path / "long")


def header_file(path: Path, text: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str = "F32", shape: object = (1,), offsets: object = (0, 4)) -> bytes:
    return json.dumps({"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"no json at all", b"[1, 2]", b"{}{}", b"\xff\xfe{}", b'{"t": 3}', b'{"t": {"dtype": "F32"}}',
        entry(dtype="F3"), entry(shape=(-1,)), entry(shape=(1.5,)), entry(shape=(2,)), entry(offsets=(4, 8)),
        entry(offsets=(0,)),
        b'{"t": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "t": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}, "b": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    ],
)  # fmt: skip
def test_a_header_that_the_format_forbids_is_refused(tmp_path: Path, text: bytes) -> None:
    """Broken JSON, unknown dtypes, wrong shapes, holes, overlaps and doubled names are one CheckpointError with the path."""
    path = header_file(tmp_path / "bad.safetensors", text, bytes(4))
    with pytest.raises(CheckpointError, match=r"bad\.safetensors"):
        open_stream_reader(path)


def test_a_header_beyond_the_library_limit_is_refused(tmp_path: Path) -> None:
    """A length prefix above 100 MB is refused before anything of that size is read."""
    path = tmp_path / "huge"
    path.write_bytes((MAX_JSON_BYTES + 1).to_bytes(8, "little") + bytes(64))
    with pytest.raises(CheckpointError, match=r"huge is not a safetensors file: it announces a header of 100000001 bytes"):
        open_stream_reader(path)


def test_an_absent_file_and_a_directory_are_typed_errors(tmp_path: Path) -> None:
    """Neither shows the caller a bare OSError."""
    with pytest.raises(CheckpointIncomplete, match="missing"):
        open_stream_reader(tmp_path / "absent")
    with pytest.raises(StorageError, match="Is a directory"):
        open_stream_reader(tmp_path)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, 4), (6, 4)], "elements 4 to 6 were never written"),
        ([(0, 4)], "elements 4 to 10 were never written"),
        ([(0, 6), (4, 6)], "elements 4 to 6 were written twice"),
        ([(0, 10), (0, 10)], "elements 0 to 10 were written twice"),
        ([(8, 4)], "has 10 elements; elements 8 to 12 were asked for"),
    ],
)
def test_a_source_that_misses_or_repeats_elements_is_found_out(
    tmp_path: Path, pieces: list[tuple[int, int]], message: str
) -> None:
    """A hole would read as zeros later, so an incomplete tensor never becomes a finished file."""

    def write() -> None:
        with open_stream_writer(tmp_path / "file", [TensorSpec("t", "float32", (10,))], {}) as writer:
            for first, count in pieces:
                writer.write("t", first, memoryview(bytes(4 * count)))
            writer.finish()

    with pytest.raises(CheckpointError, match=message):
        write()


def test_wrong_pieces_are_refused() -> None:
    """A tensor of another dtype or with gaps is refused instead of being written as other numbers."""
    spec = TensorSpec("t", "bfloat16", (4,))
    with pytest.raises(CheckpointError, match="float16"):
        host_bytes(spec, torch.zeros(4, dtype=torch.float16))
    with pytest.raises(CheckpointError, match="strided"):
        host_bytes(spec, torch.zeros(8, dtype=torch.bfloat16)[::2])
    with pytest.raises(CheckpointError, match="gaps"):
        host_bytes(spec, np.zeros(8, dtype=np.int16)[::2])
    with pytest.raises(CheckpointError, match="dtype quint8"):
        build_header([TensorSpec("t", "quint8", (1,))], {})
    with pytest.raises(CheckpointError, match="twice"):
        build_header([spec, spec], {})


def test_a_read_into_the_wrong_length_is_refused(tmp_path: Path) -> None:
    """The buffer must be exactly as long as the elements asked for, and these must exist."""
    write_tensors(tmp_path / "file", TENSORS)
    with open_stream_reader(tmp_path / "file") as reader:
        with pytest.raises(CheckpointError, match="3 elements need a buffer of 6 bytes, got one of 8"):
            reader.read("low", 0, 3, memoryview(bytearray(8)))
        with pytest.raises(CheckpointError, match="has 18 elements"):
            reader.read("low", 17, 2, memoryview(bytearray(4)))
        with pytest.raises(CheckpointError, match="no tensor other"):
            reader.read("other", 0, 1, memoryview(bytearray(4)))


def cached_bytes(path: Path) -> int:
    """Return how much of a file the page cache holds, by mincore(2)."""
    import ctypes

    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    residency = (ctypes.c_ubyte * pages)()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        anchor = ctypes.c_char.from_buffer(mapped)
        result = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(size), residency
        )
        del anchor
    assert result == 0
    return sum(page & 1 for page in residency) * mmap.PAGESIZE


SIZE = 192 << 20
PIECE = 4 << 20


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int, int, int]]:
    """A 192 MiB file written from one 4 MiB buffer: path, peak of Python memory, page cache before finish and after."""
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    piece = memoryview(bytearray(os.urandom(PIECE)))
    tracemalloc.start()
    with open_stream_writer(path, [TensorSpec("t", "uint8", (SIZE,))], {}) as writer:
        for first in range(0, SIZE, PIECE):
            writer.write("t", first, piece)
        during = cached_bytes(path)
        writer.finish()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    yield path, peak, during, cached_bytes(path)
    path.unlink()


def test_writing_needs_constant_memory_and_little_page_cache(large_file: tuple[Path, int, int, int]) -> None:
    """Of 192 MiB at most two windows are cached while writing and nothing afterwards; Python memory stays small (C41)."""
    _, peak, during, after = large_file
    assert peak < 1 << 20
    assert during <= 40 << 20
    assert after == 0


def test_reading_leaves_nothing_in_the_page_cache(large_file: tuple[Path, int, int, int]) -> None:
    """Reading 192 MiB through one 4 MiB buffer keeps the cache below two windows and empties it at the end (C41)."""
    path = large_file[0]
    into = memoryview(bytearray(PIECE))
    most = 0
    tracemalloc.start()
    with open_stream_reader(path) as reader:
        for first in range(0, SIZE, PIECE):
            reader.read("t", first, PIECE, into)
            if first % (32 << 20) == 0:
                most = max(most, cached_bytes(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most <= 40 << 20
    assert peak < 1 << 20
    assert cached_bytes(path) == 0
