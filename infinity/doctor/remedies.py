"""What to do, in the words of the user's own system: packages by its package manager, settings by its container's engine."""

from __future__ import annotations

from enum import Enum

from infinity.doctor.surroundings import Container, PackageManager, Surroundings


class Package(Enum):
    """What a build of the native modules needs."""

    LIBURING = "liburing with its headers"
    COMPILER = "a C++17 compiler and Python's headers"


_NAMES = {
    Package.LIBURING: {
        PackageManager.APT: "liburing-dev",
        PackageManager.DNF: "liburing-devel",
        PackageManager.PACMAN: "liburing",
        PackageManager.ZYPPER: "liburing-devel",
        PackageManager.APK: "liburing-dev",
    },
    Package.COMPILER: {
        PackageManager.APT: "g++ python3-dev",
        PackageManager.DNF: "gcc-c++ python3-devel",
        PackageManager.PACMAN: "gcc",
        PackageManager.ZYPPER: "gcc-c++ python3-devel",
        PackageManager.APK: "g++ python3-dev",
    },
}


class Setting(Enum):
    """What a system grants, and what its container may withhold."""

    IO_URING = "io_uring"
    LOCKED_MEMORY = "locked memory"
    OPEN_FILES = "open files"
    SHARED_MEMORY = "shared memory"
    MEMORY = "memory"
    CORES = "cores"
    GPU = "GPU"
    DISK = "disk"


_URING_CALLS = "io_uring_setup, io_uring_enter and io_uring_register"
_RUNTIME = "kubernetes has no setting for it: raise it for the node's container runtime"

_WORDS = {
    Setting.IO_URING: {
        Container.NONE: f"Let the service's filter or the security module allow {_URING_CALLS}.",
        Container.DOCKER: "Start it with `docker run --security-opt seccomp=unconfined`, "
        f"or with a seccomp profile that allows {_URING_CALLS}.",
        Container.PODMAN: "Start it with `podman run --security-opt seccomp=unconfined`, "
        f"or with a seccomp profile that allows {_URING_CALLS}.",
        Container.KUBERNETES: "Set `securityContext.seccompProfile.type: Unconfined` for the pod, "
        f"or a Localhost profile that allows {_URING_CALLS}.",
        Container.OTHER: f"Let the container's seccomp profile allow {_URING_CALLS}.",
    },
    Setting.LOCKED_MEMORY: {
        Container.NONE: "`ulimit -l unlimited`, for good in /etc/security/limits.conf: `* - memlock unlimited` "
        "(a service: `LimitMEMLOCK=infinity`).",
        Container.DOCKER: "Start it with `docker run --ulimit memlock=-1`.",
        Container.PODMAN: "Start it with `podman run --ulimit memlock=-1`.",
        Container.KUBERNETES: f"{_RUNTIME} (`LimitMEMLOCK=infinity`), "
        "or add IPC_LOCK to the container's `securityContext.capabilities.add`.",
        Container.OTHER: "Raise the container's memlock limit to unlimited.",
    },
    Setting.OPEN_FILES: {
        Container.NONE: "`ulimit -n 4096`, for good in /etc/security/limits.conf: `* - nofile 4096`.",
        Container.DOCKER: "Start it with `docker run --ulimit nofile=4096`.",
        Container.PODMAN: "Start it with `podman run --ulimit nofile=4096`.",
        Container.KUBERNETES: f"{_RUNTIME} (`LimitNOFILE=4096`).",
        Container.OTHER: "Raise the container's limit of open files to 4096.",
    },
    Setting.SHARED_MEMORY: {
        Container.NONE: "As root: `mount -o remount,size=2G /dev/shm`.",
        Container.DOCKER: "Start it with `docker run --shm-size=2g`.",
        Container.PODMAN: "Start it with `podman run --shm-size=2g`.",
        Container.KUBERNETES: "Mount an `emptyDir` with `medium: Memory` at /dev/shm.",
        Container.OTHER: "Give the container a larger /dev/shm.",
    },
    Setting.MEMORY: {
        Container.NONE: "End what else uses memory, or raise the limit that is named (a service: `MemoryMax=`).",
        Container.DOCKER: "Start it with a larger `docker run --memory`, or end what else uses memory.",
        Container.PODMAN: "Start it with a larger `podman run --memory`, or end what else uses memory.",
        Container.KUBERNETES: "Raise `resources.limits.memory` of the container.",
        Container.OTHER: "Raise the container's memory limit, or end what else uses memory.",
    },
    Setting.CORES: {
        Container.NONE: "Raise the quota (a service: `CPUQuota=`), or bind the run to as many cores with `taskset`.",
        Container.DOCKER: "Start it with `docker run --cpuset-cpus` instead of `--cpus`, or raise that.",
        Container.PODMAN: "Start it with `podman run --cpuset-cpus` instead of `--cpus`, or raise that.",
        Container.KUBERNETES: "Raise `resources.limits.cpu`, or let the node's static CPU manager give whole cores.",
        Container.OTHER: "Raise the container's CPU quota, or give it whole cores.",
    },
    Setting.GPU: {
        Container.NONE: "Install NVIDIA's driver.",
        Container.DOCKER: "If the host has a GPU: `docker run --gpus all`, with the NVIDIA container toolkit on the host.",
        Container.PODMAN: "If the host has a GPU: `podman run --device nvidia.com/gpu=all`.",
        Container.KUBERNETES: "If the node has a GPU: ask for it with `resources.limits: nvidia.com/gpu: 1`.",
        Container.OTHER: "If the host has a GPU, hand its devices to the container.",
    },
    Setting.DISK: {
        Container.NONE: "Give a directory on a local NVMe disk with ext4 or XFS.",
        Container.DOCKER: "Mount a directory of the host's NVMe disk, `docker run -v /mnt/ssd:/mnt/ssd`, and give that.",
        Container.PODMAN: "Mount a directory of the host's NVMe disk, `podman run -v /mnt/ssd:/mnt/ssd`, and give that.",
        Container.KUBERNETES: "Mount a volume on the node's NVMe disk (`local` or `hostPath`), and give its mount path.",
        Container.OTHER: "Mount a directory of the host's NVMe disk into the container, and give that.",
    },
}


def allow(setting: Setting, surroundings: Surroundings) -> str:
    """Return how this system is made to grant something."""
    return _WORDS[setting][surroundings.container]


def install(package: Package, surroundings: Surroundings) -> str:
    """Return how this system gets a package."""
    name = _NAMES[package].get(surroundings.packages)
    if name is None:
        return f"Install {package.value} by your system's package manager"
    return f"As root: `{surroundings.packages.value} {name}`"


def on_the_host(command: str, surroundings: Surroundings) -> str:
    """Return a command that changes the kernel's settings, with the place where it works."""
    place = "As root" if surroundings.container is Container.NONE else "As root on the host"
    return f"{place}: `{command}`."
