"""Checks of the CPU: its features, the cores that may be used, the Adam kernel that it runs, and bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infinity.doctor.answers import KernelAnswer
from infinity.doctor.machine import Machine
from infinity.doctor.remedies import Setting, allow
from infinity.doctor.verdict import Verdict, fails, note, ok
from infinity.memory.limits import cgroup_directories, parse_cgroup_mounts, parse_cgroup_paths

# As the kernel names what the Adam kernels use, and what makes bf16 matrix products native (x86, Arm).
_SIMD_FEATURES = ("avx2", "f16c", "avx512f", "asimd", "sve")
_BF16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")


@dataclass(frozen=True, slots=True)
class Processor:
    """What /proc/cpuinfo tells."""

    model: str
    num_cores: int  # that the system shows
    features: frozenset[str]

    def among(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of the features that this CPU has."""
        return tuple(name for name in names if name in self.features)


def parse_cpu_info(text: str) -> Processor:
    """Return the CPU that a text of /proc/cpuinfo describes, by its first core's entry; x86 and Arm spell it differently."""
    values: dict[str, str] = {}
    num_cores = 0
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        num_cores += key == "processor"
        values.setdefault(key, value)
    features = values.get("flags") or values.get("Features") or ""
    model = values.get("model name") or values.get("Hardware") or "a CPU without a name"
    return Processor(model, num_cores, frozenset(features.split()))


def check_cpu(machine: Machine) -> Verdict:
    """Which CPU this is, and which of the features that infinity uses it has."""
    cpu = parse_cpu_info(machine.text("proc/cpuinfo") or "")
    features = cpu.among(_SIMD_FEATURES + _BF16_FEATURES)
    return ok(
        f"{cpu.model}: {', '.join(features) or 'none of the features that infinity uses'}",
        needed="any; avx2 with f16c, or avx512f, makes Adam fast",
    )


def check_bf16(machine: Machine) -> Verdict:
    """Whether the CPU multiplies bf16 matrices natively; `infinity train` takes fp32 where neither it nor a GPU does."""
    needed = "a GPU, or a CPU with one of " + ", ".join(_BF16_FEATURES)
    native = parse_cpu_info(machine.text("proc/cpuinfo") or "").among(_BF16_FEATURES)
    if native:
        return ok(f"native on this CPU ({', '.join(native)})", needed=needed)
    if machine.has_nvidia_device:
        return ok("on the GPU; not native on this CPU", needed=needed)
    return note(
        "not native on this CPU: fp32 is faster here, and what `infinity train` takes", needed=needed,
        remedy="Nothing; `--precision bf16` halves weights and gradients, at the price of slower matrix products.",
    )  # fmt: skip


def check_cores(machine: Machine) -> Verdict:
    """How many cores this process may run on, and whether a quota gives it the time of fewer."""
    total = parse_cpu_info(machine.text("proc/cpuinfo") or "").num_cores or machine.cores
    found = f"{machine.cores} of {total} cores may be used"
    needed = "1 or more; computing, Adam and I/O share them"
    quota = cpu_quota(machine)
    if quota is not None and quota < machine.cores:
        return note(
            f"{found}, with a quota of {quota:g} cores' time: threads stop when it is used up",
            needed=needed, remedy=allow(Setting.CORES, machine.surroundings),
        )  # fmt: skip
    return ok(found, needed=needed)


def cpu_quota(machine: Machine) -> float | None:
    """Return how many cores' time control groups leave to this process; None where they do not limit it.

    Of version 2 every group above the process is asked, of version 1 the one that a container sees as its own.
    """
    quotas = [text.split() for text in _version_2_quotas(machine)]
    quotas.append([(machine.text(f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us") or "").strip() for name in ("quota", "period")])
    shares = [int(quota) / int(period) for quota, period in quotas if quota.isdigit()]  # "max" and -1 are no limit
    return min(shares, default=None)


def _version_2_quotas(machine: Machine) -> Iterator[str]:
    """Yield the texts of cpu.max, "quota period" in microseconds."""
    path = parse_cgroup_paths(machine.text("proc/self/cgroup") or "").get(2)
    for mount in parse_cgroup_mounts(machine.text("proc/self/mountinfo") or ""):
        if path is not None and mount.version == 2:
            for directory in cgroup_directories(mount, path):
                text = machine.text(str(directory / "cpu.max").lstrip("/"))
                if text:
                    yield text


def check_adam_kernel(machine: Machine) -> Verdict:
    """Which instruction set the Adam kernel takes, chosen by what the CPU itself reports."""
    needed = "an Adam kernel that opens; avx2 or avx512 is the fast one"
    trial = machine.run_trial("infinity.doctor.try_kernel")
    if trial.refusal is not None:
        refusal = trial.refusal
        return fails(refusal.message, needed=needed, remedy=refusal.remedy, exit_code=refusal.exit_code)
    if trial.answer is None:
        return fails(
            f"it does not open: {trial.failure}", needed=needed, remedy="See the lines on packages and on its module."
        )
    kernel = KernelAnswer(**trial.answer)
    found = f"{kernel.chosen} (of {', '.join(kernel.names)}), threads: {kernel.num_threads}"
    if kernel.chosen == kernel.names[0] != "scalar":
        return ok(found, needed=needed)
    remedy = "Nothing: this CPU has no faster one."
    if kernel.chosen != kernel.names[0]:
        remedy = f"Unset INFINITY_CPU_ADAM to get {kernel.names[0]}."
    return note(found, needed=needed, remedy=remedy)
