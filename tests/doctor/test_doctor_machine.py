"""Every line about the machine, in every state, on machines that are not this one."""

from __future__ import annotations

from pathlib import Path

import machine_samples as samples
import pytest

from infinity.byte_sizes import GIB, MIB
from infinity.doctor import memory, processor, software
from infinity.doctor.machine import Limits
from infinity.doctor.trials import Refusal, Trial
from infinity.doctor.verdict import State
from infinity.train.options import native_bf16

V1_CPU = "sys/fs/cgroup/cpu/cpu.cfs_"


def test_system(tmp_path: Path) -> None:
    """The distribution, the kernel and the container, as they call themselves."""
    files = {"etc/os-release": samples.FEDORA, "proc/sys/kernel/osrelease": "6.11.4-301.fc41.x86_64\n"}
    machine = samples.fake_machine(tmp_path, files=files, environment={"container": "podman"})
    assert software.check_system(machine).found == "Fedora Linux 41, kernel 6.11.4-301.fc41.x86_64, podman"


def test_python(tmp_path: Path) -> None:
    """The version that infinity needs passes, an older one fails."""
    machine = samples.fake_machine(tmp_path)
    assert software.check_python(machine, (3, 11, 0)).state is State.OK
    old = software.check_python(machine, (3, 10, 14))
    assert (old.state, old.exit_code) == (State.FAILS, 4)
    assert "3.10.14" in old.found
    assert "3.11" in old.needed


@pytest.mark.parametrize(
    ("required", "versions", "state", "words"),
    [
        (samples.REQUIRED, {"torch": "2.13.0+cpu", "numpy": "1.26"}, State.OK, "torch 2.13.0+cpu, numpy 1.26"),
        (samples.REQUIRED, {"torch": "2.13.0"}, State.MISSING, "without numpy>=1.26"),
        (samples.REQUIRED, {"torch": "2.9.1", "numpy": "2.0"}, State.FAILS, "torch 2.9.1"),
        (samples.REQUIRED, {"torch": "2.9.1"}, State.MISSING, "without numpy>=1.26"),
        (None, {}, State.NOTE, "is not installed"),
    ],
)
def test_packages(
    tmp_path: Path, required: tuple[str, ...] | None, versions: dict[str, str], state: State, words: str
) -> None:
    """What infinity's metadata requires is compared with what is installed; extras are left out; pip gets the rest."""
    verdict = software.check_packages(samples.fake_machine(tmp_path, required=required, versions=versions))
    assert verdict.state is state
    assert words in verdict.found
    if state in (State.MISSING, State.FAILS):
        assert verdict.remedy.startswith("pip install '")
        assert ("torch>=2.11" in verdict.remedy) is (versions["torch"] == "2.9.1")
        assert ("numpy>=1.26" in verdict.remedy) is ("numpy" not in versions)
        assert "mypy" not in verdict.remedy


def test_numbers_of_versions() -> None:
    """Local parts, pre-releases and zeros at the end do not count; numbers are compared as numbers."""
    assert software.numbers("2.13.0+cpu") == (2, 13)
    assert software.numbers("2.11.0rc1") == (2, 11)
    assert software.numbers("1.10") > software.numbers("1.9.9")
    assert software.numbers("unknown") == ()


def test_native_modules_that_do_not_load(tmp_path: Path) -> None:
    """C21: a module that is there and does not load is a line with the loader's words, or with the signal."""
    why = "ImportError: libstdc++.so.6: version `GLIBCXX_3.4.32' not found"
    machine = samples.fake_machine(tmp_path, trials={"infinity.doctor.try_import": Trial(failure=why)})
    adam, io = software.check_adam_module(machine), software.check_io_module(machine)
    checksums = software.check_checksum_module(machine)
    assert (adam.state, io.state, checksums.state) == (State.FAILS, State.NOTE, State.FAILS)
    assert {why in verdict.found for verdict in (adam, io, checksums)} == {True}
    assert "--no-checksums" in checksums.remedy


def test_native_modules_that_load(tmp_path: Path) -> None:
    """All are fine then, and nothing is to be done."""
    machine = samples.fake_machine(tmp_path)
    for check in (software.check_adam_module, software.check_io_module, software.check_checksum_module):
        assert (check(machine).state, check(machine).remedy) == (State.OK, "")


@pytest.mark.parametrize(
    ("text", "model", "num_cores", "features"),
    [
        (samples.ZEN2, "AMD EPYC 7742", 2, "avx2, f16c"),
        (samples.SAPPHIRE_RAPIDS, "Platinum 8480C", 1, "avx2, f16c, avx512f, avx512_bf16, amx_bf16"),
        (samples.SKYLAKE, "Gold 6148", 1, "avx2, f16c, avx512f"),
        (samples.QEMU64, "QEMU Virtual CPU", 1, "none of the features"),
        (samples.GRAVITON3, "a CPU without a name", 1, "asimd, sve, bf16"),
        ("", "a CPU without a name", 0, "none of the features"),
    ],
)
def test_cpu_features(tmp_path: Path, text: str, model: str, num_cores: int, features: str) -> None:
    """C53: samples of /proc/cpuinfo of x86 and Arm; the line names the features that infinity uses."""
    verdict = processor.check_cpu(samples.fake_machine(tmp_path, files={"proc/cpuinfo": text}))
    assert processor.parse_cpu_info(text).num_cores == num_cores
    assert model in verdict.found
    assert f": {features}" in verdict.found


@pytest.mark.parametrize("text", [samples.ZEN2, samples.SAPPHIRE_RAPIDS, samples.SKYLAKE, samples.GRAVITON3, ""])
def test_bf16_is_what_train_takes_it_for(tmp_path: Path, text: str) -> None:
    """C53: the line says native exactly where `infinity train` chooses bf16; a GPU counts."""
    machine = samples.fake_machine(tmp_path, files={"proc/cpuinfo": text})
    native = native_bf16(tmp_path / "proc/cpuinfo", tmp_path / "dev")
    assert (processor.check_bf16(machine).state is State.OK) is native
    (tmp_path / "dev/nvidia0").touch()
    assert native_bf16(tmp_path / "proc/cpuinfo", tmp_path / "dev")
    assert processor.check_bf16(machine).state is State.OK


@pytest.mark.parametrize(
    ("files", "state", "quota"),
    [
        ({}, State.OK, None),
        ({"groups/cpu.max": "max 100000\n"}, State.OK, None),
        ({"groups/job/cpu.max": "150000 100000\n"}, State.NOTE, 1.5),
        ({"groups/job/cpu.max": "400000 100000\n", "groups/cpu.max": "300000 100000\n"}, State.OK, 3.0),
        ({f"{V1_CPU}quota_us": "-1\n", f"{V1_CPU}period_us": "100000\n"}, State.OK, None),
        ({f"{V1_CPU}quota_us": "50000\n", f"{V1_CPU}period_us": "100000\n"}, State.NOTE, 0.5),
    ],
)
def test_cores_and_quotas(tmp_path: Path, files: dict[str, str], state: State, quota: float | None) -> None:
    """Every group above the process is asked for a quota, of both versions; one below the cores allowed is a note."""
    files = dict(files)
    files["proc/self/cgroup"] = "0::/job\n"
    files["proc/self/mountinfo"] = f"{samples.ROOT_MOUNT}29 23 0:26 / /groups rw - cgroup2 cgroup2 rw\n"
    machine = samples.fake_machine(tmp_path, files=files, environment={"container": "docker"})
    verdict = processor.check_cores(machine)
    assert processor.cpu_quota(machine) == quota
    assert verdict.state is state
    assert ("docker run --cpuset-cpus" in verdict.remedy) is (state is State.NOTE)


@pytest.mark.parametrize(
    ("trial", "state", "exit_code", "words"),
    [
        (Trial(answer=samples.KERNEL), State.OK, 0, "avx512 (of avx512, avx2, scalar), threads: 2"),
        (Trial(answer={**samples.KERNEL, "chosen": "scalar"}), State.NOTE, 0, "Unset INFINITY_CPU_ADAM to get avx512"),
        (Trial(answer={**samples.KERNEL, "names": ["scalar"], "chosen": "scalar"}), State.NOTE, 0, "has no faster one"),
        (Trial(answer={**samples.KERNEL, "names": ["avx2", "scalar"], "chosen": "avx2"}), State.OK, 0, "avx2 (of avx2"),
        (Trial(refusal=Refusal("no such kernel", "Choose one.", 2, 0)), State.FAILS, 2, "no such kernel"),
        (Trial(refusal=Refusal("module is missing", "Build it.", 4, 0)), State.FAILS, 4, "module is missing"),
        (Trial(failure="ended by SIGILL"), State.FAILS, 4, "ended by SIGILL"),
    ],
)
def test_adam_kernel(tmp_path: Path, trial: Trial, state: State, exit_code: int, words: str) -> None:
    """C52, C53: the chosen instruction set is printed; a slow one is a note, none at all ends with the error's own code."""
    verdict = processor.check_adam_kernel(samples.fake_machine(tmp_path, trials={"infinity.doctor.try_kernel": trial}))
    assert (verdict.state, verdict.exit_code) == (state, exit_code)
    assert words in f"{verdict.found} {verdict.remedy}"


@pytest.mark.parametrize(
    ("limit", "state", "exit_code"),
    [("max", State.OK, 0), (str(GIB), State.NOTE, 0), (str(300 * MIB), State.FAILS, 3)],
)
@pytest.mark.parametrize("version", [1, 2])
def test_memory(tmp_path: Path, limit: str, state: State, exit_code: int, version: int) -> None:
    """The least of RAM and the control groups, versions 1 and 2, with the file that sets it and docker's own words."""
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
    limit_file, usage_file = names[version]
    groups = tmp_path / "groups"
    mount = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
    limit = "9223372036854771712" if (limit, version) == ("max", 1) else limit
    files = {
        "proc/self/cgroup": "0::/job\n" if version == 2 else "9:memory:/job\n",
        "proc/self/mountinfo": f"29 23 0:26 / {groups} rw - {mount}\n",
        f"groups/job/{limit_file}": f"{limit}\n", f"groups/job/{usage_file}": "0\n", "groups/job/memory.stat": "",
    }  # fmt: skip
    machine = samples.fake_machine(tmp_path, files=files, environment={"container": "docker"})
    verdict = memory.check_memory(machine)
    assert (verdict.state, verdict.exit_code) == (state, exit_code)
    assert "RAM 15.62 GiB" in verdict.found
    if state is not State.OK:
        assert f"cgroup v{version} ({groups}/job/{limit_file})" in verdict.found
        assert "docker run --memory" in verdict.remedy


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        ("[always] madvise never", State.OK, "always"),
        ("always [madvise] never", State.OK, "madvise"),
        ("always madvise [never]", State.NOTE, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"),
        (None, State.NOTE, "no transparent huge pages"),
    ],
)
def test_huge_pages(tmp_path: Path, text: str | None, state: State, words: str) -> None:
    """never is a note with the command that changes it, and so is a kernel without them."""
    name = "sys/kernel/mm/transparent_hugepage/enabled"
    verdict = memory.check_huge_pages(samples.fake_machine(tmp_path, files={name: text}))
    assert verdict.state is state
    assert words in f"{verdict.found} {verdict.remedy}"


def test_shared_memory(tmp_path: Path) -> None:
    """Docker's 64 MiB of /dev/shm are a note with docker's option; enough is fine; none at all is a note."""
    machine = samples.fake_machine(tmp_path, environment={"container": "docker"}, total_bytes=lambda _: 64 * MIB)
    verdict = memory.check_shared_memory(machine)
    assert (verdict.state, verdict.found) == (State.NOTE, "64.00 MiB")
    assert "--shm-size=2g" in verdict.remedy
    assert memory.check_shared_memory(samples.fake_machine(tmp_path / "b")).state is State.OK
    (tmp_path / "dev/shm").rmdir()
    assert "no /dev/shm" in memory.check_shared_memory(machine).found


@pytest.mark.parametrize(
    ("limit", "capabilities", "state", "found"),
    [
        (None, "0", State.OK, "unlimited"),
        (64 * MIB, "0", State.OK, "64.00 MiB"),
        (8 * MIB, "0", State.NOTE, "8.00 MiB"),
        (64 << 10, "00000000a80425fb", State.NOTE, "64.00 KiB"),
        (64 << 10, "0000000000004000", State.OK, "does not bind this process (CAP_IPC_LOCK)"),
    ],
)
def test_locked_memory(tmp_path: Path, limit: int | None, capabilities: str, state: State, found: str) -> None:
    """C27: a low limit is a note that says needed against current, unless the process may lock memory anyway."""
    files = {"proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities}\n"}
    verdict = memory.check_locked_memory(samples.fake_machine(tmp_path, files=files, limits=Limits(limit, None)))
    assert verdict.state is state
    assert found in verdict.found
    assert "64.00 MiB" in verdict.needed
    assert ("ulimit -l unlimited" in verdict.remedy) is (state is State.NOTE)


@pytest.mark.parametrize(
    ("limit", "state", "exit_code"), [(None, State.OK, 0), (1024, State.OK, 0), (256, State.NOTE, 0), (16, State.FAILS, 4)]
)
def test_open_files(tmp_path: Path, limit: int | None, state: State, exit_code: int) -> None:
    """A limit below what one run opens fails; a low one is a note."""
    verdict = memory.check_open_files(samples.fake_machine(tmp_path, limits=Limits(None, limit)))
    assert (verdict.state, verdict.exit_code) == (state, exit_code)
    assert ("ulimit -n 4096" in verdict.remedy) is (state is not State.OK)
