"""Whose words a remedy should use: which distribution this is, and whether it runs in a container, and in whose."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class PackageManager(Enum):
    """What installs packages; the value is the command, up to the packages' names."""

    APT = "apt install"
    DNF = "dnf install"
    PACMAN = "pacman -S"
    ZYPPER = "zypper install"
    APK = "apk add"
    UNKNOWN = ""


class Container(Enum):
    """Who started this container; the value is how people call it."""

    NONE = "no container"
    DOCKER = "docker"
    PODMAN = "podman"
    KUBERNETES = "kubernetes"
    OTHER = "a container"


# By ID and, for distributions made from another one, ID_LIKE of os-release.
_MANAGERS = {
    "debian": PackageManager.APT, "ubuntu": PackageManager.APT,
    "fedora": PackageManager.DNF, "rhel": PackageManager.DNF, "centos": PackageManager.DNF, "amzn": PackageManager.DNF,
    "arch": PackageManager.PACMAN,
    "suse": PackageManager.ZYPPER, "opensuse": PackageManager.ZYPPER,
    "alpine": PackageManager.APK,
}  # fmt: skip

# Files that a container's engine leaves at the root, and words in the paths of its control groups.
_MARKS = {".dockerenv": Container.DOCKER, "run/.containerenv": Container.PODMAN}
_GROUPS = {"kubepods": Container.KUBERNETES, "libpod": Container.PODMAN, "docker": Container.DOCKER}


_UNKNOWN = "an unknown system"


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the words of a remedy depend on."""

    distribution: str = _UNKNOWN  # as it calls itself
    packages: PackageManager = PackageManager.UNKNOWN
    container: Container = Container.NONE
    has_systemd: bool = False


def read_surroundings(root: Path, environment: Mapping[str, str]) -> Surroundings:
    """Return what the files below `root` (the file system's, or a test's) and the environment tell."""
    release: dict[str, str] = {}
    for name in ("etc/os-release", "usr/lib/os-release"):  # the second serves where the first is absent
        if not release and (root / name).is_file():
            release = parse_os_release((root / name).read_text(encoding="utf-8", errors="replace"))
    return Surroundings(
        distribution=release.get("PRETTY_NAME") or release.get("ID") or _UNKNOWN,
        packages=package_manager(release),
        container=_container(root, environment),
        has_systemd=(root / "run/systemd/system").is_dir(),
    )


def parse_os_release(text: str) -> dict[str, str]:
    """Return the variables of an os-release file, without the quotes of their values."""
    values = {}
    for line in text.splitlines():
        key, found, value = line.strip().partition("=")
        if found and not key.startswith("#"):
            values[key] = " ".join(shlex.split(value, comments=True))
    return values


def package_manager(release: Mapping[str, str]) -> PackageManager:
    """Return what installs packages on the system that these variables of os-release describe."""
    for word in (release.get("ID", ""), *release.get("ID_LIKE", "").split()):
        manager = _MANAGERS.get(word) or _MANAGERS.get(word.partition("-")[0])  # opensuse-leap, opensuse-tumbleweed
        if manager is not None:
            return manager
    return PackageManager.UNKNOWN


def _container(root: Path, environment: Mapping[str, str]) -> Container:
    if "KUBERNETES_SERVICE_HOST" in environment:
        return Container.KUBERNETES
    groups = root / "proc/self/cgroup"
    text = groups.read_text(encoding="utf-8", errors="replace") if groups.is_file() else ""
    for word, container in _GROUPS.items():
        if word in text:
            return container
    for mark, container in _MARKS.items():
        if (root / mark).exists():
            return container
    named = environment.get("container", "")  # set by most engines
    return next((kind for kind in Container if kind.value == named), Container.OTHER if named else Container.NONE)
