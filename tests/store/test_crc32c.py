"""CRC32C is the published function on every instruction set, for any length and alignment."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infinity import _crc32c
from infinity.aio.request import address_of
from infinity.errors import ConfigError
from infinity.store.checksums import checksum_kernels, open_checksums

KERNELS = checksum_kernels()
# Appendix B.4 of RFC 3720, and the check value of the catalogue of CRC algorithms.
VECTORS = {
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
    b"": 0,
}
MEMORY_BYTES = 1 << 16
MEMORY = mmap.mmap(-1, MEMORY_BYTES)
ADDRESS = address_of(MEMORY)
# Around every length at which one of the kernels goes another way: 8, 64, 384, 512 and 12,288 bytes.
LENGTHS = st.one_of(
    st.integers(0, 1100),
    st.sampled_from([12_288, 24_576, 4096, 8192]).flatmap(lambda length: st.integers(length - 65, length + 65)),
)


def by_definition(data: bytes) -> int:
    """Divide bit by bit."""
    state = 0xFFFFFFFF
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("data", VECTORS, ids=lambda data: data[:4].hex())
def test_published_values(kernel: str, data: bytes) -> None:
    """The values that RFC 3720 prints."""
    MEMORY[: len(data)] = data
    assert open_checksums(kernel).of(ADDRESS, len(data)) == VECTORS[data]


@settings(max_examples=150, deadline=None)
@given(seed=st.binary(min_size=8, max_size=8), start=st.integers(0, 70), length=LENGTHS)
def test_every_kernel_gives_the_same(seed: bytes, start: int, length: int) -> None:
    """Any bytes, any length, any alignment: every kernel agrees with division bit by bit."""
    data = (seed + bytes(range(251))) * (length // 200 + 1)
    MEMORY[start : start + length] = data[:length]
    expected = by_definition(data[:length])
    found = {name: open_checksums(name).of(ADDRESS + start, length) for name in KERNELS}
    assert found == dict.fromkeys(KERNELS, expected)


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 5000))
def test_it_may_be_computed_in_pieces(kernel: str, cut: int) -> None:
    """The checksum of what came before is where the next piece begins."""
    native = _crc32c.Crc32c(kernel)
    MEMORY[:5000] = bytes(i * i % 251 for i in range(5000))
    whole = native.extend(0, ADDRESS, 5000)
    assert native.extend(native.extend(0, ADDRESS, cut), ADDRESS + cut, 5000 - cut) == whole


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_single_bit_counts(kernel: str) -> None:
    """Each of a page's 32,768 bits changes the checksum, and each to another value."""
    checksums = open_checksums(kernel)
    MEMORY[:4096] = bytes(i * 7 % 256 for i in range(4096))
    found = {checksums.of(ADDRESS, 4096)}
    for bit in range(8 * 4096):
        MEMORY[bit // 8] ^= 1 << bit % 8
        found.add(checksums.of(ADDRESS, 4096))
        MEMORY[bit // 8] ^= 1 << bit % 8
    assert len(found) == 8 * 4096 + 1


def test_an_unknown_kernel_is_refused_by_name() -> None:
    """The message names those that there are; the last one is for any CPU."""
    assert KERNELS[-1] == "portable"
    assert open_checksums().name == KERNELS[0]
    with pytest.raises(ConfigError, match=r"'neon'\. Choose one of .*portable"):
        open_checksums("neon")
