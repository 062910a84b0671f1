"""Machines that are not this one: texts of their kernel and system files, and a Machine that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from infinity.doctor.machine import Limits, Machine, Packages
from infinity.doctor.trials import Trial

DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nNAME="Debian GNU/Linux"\nVERSION_ID="12"\nID=debian\n'
UBUNTU = 'PRETTY_NAME="Ubuntu 24.04.1 LTS"\nNAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\n'
FEDORA = 'NAME="Fedora Linux"\nVERSION="41 (Container Image)"\nID=fedora\nPRETTY_NAME="Fedora Linux 41"\n'
ROCKY = 'NAME="Rocky Linux"\nID="rocky"\nID_LIKE="rhel centos fedora"\nPRETTY_NAME="Rocky Linux 9.4 (Blue Onyx)"\n'
ARCH = 'NAME="Arch Linux"\nPRETTY_NAME="Arch Linux"\nID=arch\nBUILD_ID=rolling\n'
ALPINE = 'NAME="Alpine Linux"\nID=alpine\nVERSION_ID=3.20.3\nPRETTY_NAME="Alpine Linux v3.20"\n'
LEAP = 'NAME="openSUSE Leap"\nID="opensuse-leap"\nID_LIKE="suse opensuse"\nPRETTY_NAME="openSUSE Leap 15.6"\n'
TUMBLEWEED = '# a comment\nNAME="openSUSE Tumbleweed"\nID="opensuse-tumbleweed"\nPRETTY_NAME="openSUSE Tumbleweed"\n'
NIXOS = 'NAME=NixOS\nID=nixos\nPRETTY_NAME="NixOS 24.11 (Vicuna)"\n'

ZEN2 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 7742 64-Core Processor
flags\t\t: fpu sse sse2 ssse3 fma sse4_1 sse4_2 avx f16c rdrand avx2 bmi2

processor\t: 1
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 7742 64-Core Processor
flags\t\t: fpu sse sse2 ssse3 fma sse4_1 sse4_2 avx f16c rdrand avx2 bmi2
"""
SAPPHIRE_RAPIDS = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum 8480C
flags\t\t: fpu sse2 fma avx f16c avx2 avx512f avx512dq avx512bw avx512_bf16 amx_bf16 avx512_fp16 amx_tile
"""
SKYLAKE = """\
processor\t: 0
model name\t: Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz
flags\t\t: fpu sse2 fma avx f16c avx2 avx512f avx512dq avx512bw
"""
QEMU64 = """\
processor\t: 0
model name\t: QEMU Virtual CPU version 2.5+
flags\t\t: fpu de pse tsc msr pae mce cx8 apic sep mtrr sse sse2 syscall nx lm pni cx16
"""
GRAVITON3 = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp sve asimdfhm i8mm bf16
CPU implementer\t: 0x41
"""

MEMINFO = "MemTotal:       16384000 kB\nMemFree:         1000000 kB\nMemAvailable:    8388608 kB\n"
ROOT_MOUNT = "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
FILES = {
    "etc/os-release": DEBIAN,
    "proc/cpuinfo": SAPPHIRE_RAPIDS,
    "proc/meminfo": MEMINFO,
    "proc/self/cgroup": "0::/\n",
    "proc/self/mountinfo": ROOT_MOUNT,
    "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}
REQUIRED = ("torch>=2.11", "numpy>=1.26", "mypy>=1.13; extra == 'dev'")
KERNEL = {"names": ["avx512", "avx2", "scalar"], "chosen": "avx512", "num_threads": 2}
ENGINE = {
    "engine": "uring", "direct": True, "uring_refusal": None, "registered_files": True, "registered_buffers": True,
    "buffer_bytes": 64 << 20, "registration_notes": [],
}  # fmt: skip
DIRECTORY = {
    "path": "/mnt/ssd", "is_new": False, "device": "8:1", "is_memory": False, "free_bytes": 1 << 40, "free_inodes": 10**6,
    "io": ENGINE,
}  # fmt: skip
TORCH = {
    "version": "2.13.0", "cuda_build": "13.0", "num_threads": 2, "bf16_error": "", "devices": [], "cuda_error": "",
    "warnings": [],
}  # fmt: skip
H200 = {"name": "NVIDIA H200", "total_bytes": 139 << 30, "capability": "9.0"}
TRIALS = {
    "infinity.doctor.try_import": Trial(answer={"path": "/x.so"}),
    "infinity.doctor.try_kernel": Trial(answer=KERNEL),
    "infinity.doctor.try_directory": Trial(answer=DIRECTORY),
    "infinity.doctor.try_torch": Trial(answer=TORCH),
}
VERSIONS = {"torch": "2.13.0+cpu", "numpy": "2.1.3"}
UNLIMITED = Limits(None, None)
MODULES = frozenset({"infinity._aio", "infinity._cpu_adam", "infinity._crc32c", "torch"})


def fake_machine(
    root: Path,
    *,
    files: Mapping[str, str | None] = {},
    environment: Mapping[str, str] = {},
    cores: int = 2,
    limits: Limits = UNLIMITED,
    required: tuple[str, ...] | None = REQUIRED,
    versions: Mapping[str, str] = VERSIONS,
    modules: frozenset[str] = MODULES,
    trials: Mapping[str, Trial] = {},
    total_bytes: Callable[[Path], int] = lambda _: 8 << 30,
) -> Machine:
    """Write a healthy machine's files below `root`, changed as said (None: absent); return the machine that reads them."""
    for name, text in {**FILES, **files}.items():
        if text is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    (root / "dev/shm").mkdir(parents=True)
    return Machine(
        root=root, environment=environment, cores=cores, limits=limits,
        packages=Packages(required, lambda name: versions.get(name)),
        has_module=modules.__contains__, total_bytes=total_bytes,
        run_trial=lambda module, *_: {**TRIALS, **trials}[module],
    )  # fmt: skip
