"""Which instruction set and how many threads: by what the CPU has, the cores that may be used, and what is asked for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from infinity import _cpu_adam
from infinity.errors import ConfigError
from infinity.optim.kernel import choose_kernel, kernel_names, kernel_requirements, open_kernel
from infinity.optim.kernel_choice import KERNEL_VARIABLE, THREADS_VARIABLE, choose

NAMES = ("avx512", "avx2", "scalar")

# The flags of real machines' /proc/cpuinfo, as far as they matter here.
MACHINES = {
    "Xeon Platinum 8175M": ("fma sse4_2 movbe avx f16c rdrand avx2 avx512f avx512dq avx512cd avx512bw avx512vl", NAMES),
    "EPYC 7R13": ("fma cx16 sse4_1 sse4_2 movbe popcnt aes xsave avx f16c rdrand avx2 bmi2 vaes", ("avx2", "scalar")),
    "Core i7-3770": ("sse4_1 sse4_2 popcnt aes xsave avx f16c rdrand", ("scalar",)),
    "Atom C3758": ("ssse3 cx16 sse4_1 sse4_2 movbe popcnt aes rdrand rdseed sha_ni", ("scalar",)),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_required_features_suit_real_machines(machine: str) -> None:
    """C53: what each kernel needs, held against the flags of real processors."""
    flags, expected = MACHINES[machine]
    assert tuple(name for name in NAMES if set(kernel_requirements()[name]) <= set(flags.split())) == expected


def test_detection_finds_what_the_system_says() -> None:
    """C53: the kernels that CPUID allows are those whose features the system lists; the scalar one is always there."""
    flags = set(re.findall(r"(?m)^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text())[0].split())
    assert kernel_names() == tuple(name for name in NAMES if set(kernel_requirements()[name]) <= flags)


def disassembled() -> Iterator[tuple[str, str, str]]:
    """Function, mnemonic and operands of every instruction of the native module."""
    command = ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", _cpu_adam.__file__]
    function = ""
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.endswith(">:"):
            function = line
        elif line.startswith(" ") and ":\t" in line:
            mnemonic, _, operands = line.partition(":\t")[2].strip().partition(" ")
            yield function, mnemonic, operands


@pytest.mark.skipif(shutil.which("objdump") is None, reason="binutils are not installed")
def test_no_instruction_stands_outside_its_instruction_set_and_none_is_fused() -> None:
    """C52: all but the AVX kernels runs on any CPU; AVX2 needs no AVX-512; no multiply-add is contracted anywhere."""
    seen = set()
    for function, mnemonic, operands in disassembled():
        assert not mnemonic.startswith(("vfmadd", "vfmsub", "vfnmadd", "vfnmsub")), function
        if mnemonic.startswith("v") and mnemonic not in ("verr", "verw"):
            owner = re.search(r"cpu_adam::(avx2|avx512)::", function)
            assert owner is not None, f"{mnemonic} in {function}"
            seen.add(owner[1])
            assert owner[1] == "avx512" or "%zmm" not in operands, function
    assert seen == {"avx2", "avx512"}


def test_the_team_is_the_ranks_share_of_the_cores() -> None:
    """C51: cores / local ranks, at least one; each rank its own part; OMP_NUM_THREADS plays no role."""
    one = choose(NAMES, num_cores=8, num_threads=None, environment={"OMP_NUM_THREADS": "1"})
    assert (one.name, one.num_threads, one.share_index, one.num_shares) == ("avx512", 8, 0, 1)
    assert one.words() == "avx512, 8 of 8 cores"
    ranks = [
        choose(NAMES, num_cores=8, num_threads=None, environment={"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"})
        for rank in range(2)
    ]
    assert [(rank.num_threads, rank.share_index, rank.num_shares) for rank in ranks] == [(4, 0, 2), (4, 1, 2)]
    assert ranks[1].words() == "avx512, 4 of 8 cores, shared by 2 ranks"
    crowded = choose(NAMES, num_cores=2, num_threads=None, environment={"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"})
    assert crowded.num_threads == 1


def test_a_number_of_threads_may_be_asked_for() -> None:
    """C51: the configuration wins over the environment, both over the share; never more than there are cores."""
    environment = {THREADS_VARIABLE: "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    asked = choose(NAMES, num_cores=8, num_threads=None, environment=environment)
    assert (asked.num_threads, asked.share_index, asked.num_shares) == (3, 0, 1)
    within = choose(NAMES, num_cores=8, num_threads=2, environment=environment)
    assert (within.num_threads, within.share_index, within.num_shares) == (2, 1, 4)
    assert choose(NAMES, num_cores=8, num_threads=99, environment={}).num_threads == 8


@pytest.mark.parametrize(("environment", "threads", "named"), [
    ({KERNEL_VARIABLE: "sse9"}, None, "'sse9'.*scalar"),
    ({THREADS_VARIABLE: "many"}, None, "INFINITY_ADAM_THREADS='many'"),
    ({THREADS_VARIABLE: "0"}, None, "INFINITY_ADAM_THREADS='0'"),
    ({"LOCAL_WORLD_SIZE": "-1"}, None, "LOCAL_WORLD_SIZE='-1'"),
    ({}, 0, "0 is too few"),
])  # fmt: skip
def test_what_cannot_be_is_refused(environment: dict[str, str], threads: int | None, named: str) -> None:
    """An unknown kernel and counts that are none are errors that name the variable and its value."""
    with pytest.raises(ConfigError, match=named):
        choose(NAMES, num_cores=4, num_threads=threads, environment=environment)


def test_kernel_is_chosen_by_name() -> None:
    """Every kernel that this CPU can run may be forced; the scalar one is always there (C52)."""
    assert kernel_names()[-1] == "scalar"
    forced = [open_kernel(environment={KERNEL_VARIABLE: name}).name for name in kernel_names()]
    assert forced == list(kernel_names())
    assert open_kernel(environment={}).name == choose_kernel(environment={}).name == kernel_names()[0]


def test_the_cores_that_may_be_used_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """C51: an affinity mask is respected."""
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 5})
    assert choose_kernel(environment={}).num_threads == 3
