"""Whose words the remedies use: the distribution's package manager and the container's engine, neutral ones otherwise."""

from __future__ import annotations

from pathlib import Path

import machine_samples as samples
import pytest

from infinity.doctor.remedies import Package, Setting, allow, install, on_the_host
from infinity.doctor.software import check_adam_module, check_io_module
from infinity.doctor.surroundings import (
    Container,
    PackageManager,
    Surroundings,
    package_manager,
    parse_os_release,
    read_surroundings,
)
from infinity.doctor.verdict import State


@pytest.mark.parametrize(
    ("text", "manager"),
    [
        (samples.DEBIAN, PackageManager.APT),
        (samples.UBUNTU, PackageManager.APT),
        (samples.FEDORA, PackageManager.DNF),
        (samples.ROCKY, PackageManager.DNF),
        (samples.ARCH, PackageManager.PACMAN),
        (samples.ALPINE, PackageManager.APK),
        (samples.LEAP, PackageManager.ZYPPER),
        (samples.TUMBLEWEED, PackageManager.ZYPPER),
        (samples.NIXOS, PackageManager.UNKNOWN),
        ("", PackageManager.UNKNOWN),
    ],
)
def test_the_package_manager_of_a_distribution(text: str, manager: PackageManager) -> None:
    """C22: by ID, and by ID_LIKE for what is made from another distribution; unknown ones stay unknown."""
    assert package_manager(parse_os_release(text)) is manager


def test_quotes_and_comments_of_os_release() -> None:
    """Values lose their quotes; comments and empty lines are no values."""
    text = '# x=y\n\nID=\'a b\'\nNAME="c \\" d"\nEMPTY=\n'
    assert parse_os_release(text) == {"ID": "a b", "NAME": 'c " d', "EMPTY": ""}


@pytest.mark.parametrize(
    ("text", "liburing", "compiler"),
    [
        (samples.DEBIAN, "As root: `apt install liburing-dev`", "`apt install g++ python3-dev`"),
        (samples.FEDORA, "As root: `dnf install liburing-devel`", "`dnf install gcc-c++ python3-devel`"),
        (samples.ARCH, "As root: `pacman -S liburing`", "`pacman -S gcc`"),
        (samples.LEAP, "As root: `zypper install liburing-devel`", "`zypper install gcc-c++ python3-devel`"),
        (samples.ALPINE, "As root: `apk add liburing-dev`", "`apk add g++ python3-dev`"),
        (samples.NIXOS, "Install liburing with its headers by your system's package manager", "Install a C++17 compiler"),
    ],
)
def test_modules_that_were_not_built(tmp_path: Path, text: str, liburing: str, compiler: str) -> None:
    """C21, C22: without io_uring's module training runs, without Adam's it cannot; both name this system's packages."""
    machine = samples.fake_machine(tmp_path, files={"etc/os-release": text}, modules=frozenset())
    io, adam = check_io_module(machine), check_adam_module(machine)
    assert (io.state, io.exit_code) == (State.NOTE, 0)
    assert (adam.state, adam.exit_code) == (State.MISSING, 4)
    assert io.remedy.startswith(liburing)
    assert compiler in adam.remedy
    assert "threads do the I/O instead" in io.found


@pytest.mark.parametrize(
    ("files", "environment", "container"),
    [
        ({}, {}, Container.NONE),
        ({".dockerenv": ""}, {}, Container.DOCKER),
        ({"run/.containerenv": ""}, {}, Container.PODMAN),
        ({"proc/self/cgroup": "12:memory:/docker/4f2a\n"}, {}, Container.DOCKER),
        ({"proc/self/cgroup": "0::/machine.slice/libpod-4f2a.scope\n"}, {}, Container.PODMAN),
        ({"proc/self/cgroup": "0::/kubepods.slice/pod1/cri-4f.scope\n", ".dockerenv": ""}, {}, Container.KUBERNETES),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, Container.KUBERNETES),
        ({}, {"container": "podman"}, Container.PODMAN),
        ({}, {"container": "lxc"}, Container.OTHER),
    ],
)
def test_whose_container_this_is(
    tmp_path: Path, files: dict[str, str], environment: dict[str, str], container: Container
) -> None:
    """Marks of the engines, words in the control groups, and the environment; kubernetes wins over the engine below it."""
    machine = samples.fake_machine(tmp_path, files=files, environment=environment)
    assert machine.surroundings.container is container


def test_the_second_place_of_os_release(tmp_path: Path) -> None:
    """/usr/lib/os-release serves where /etc has none; without both the system is unknown."""
    machine = samples.fake_machine(tmp_path / "a", files={"etc/os-release": None, "usr/lib/os-release": samples.ALPINE})
    assert machine.surroundings.packages is PackageManager.APK
    (tmp_path / "b").mkdir()
    assert read_surroundings(tmp_path / "b", {}) == Surroundings()


def test_every_remedy_has_words_for_every_system() -> None:
    """No setting lacks words for a container, and no package for a package manager; the engines' words differ."""
    for container in Container:
        for setting in Setting:
            assert allow(setting, Surroundings(container=container))
    for package in Package:
        for manager in PackageManager:
            assert manager.value in install(package, Surroundings(packages=manager))
    words = {allow(Setting.IO_URING, Surroundings(container=container)) for container in Container}
    assert len(words) == len(Container)
    assert "docker run --security-opt seccomp=unconfined" in allow(
        Setting.IO_URING, Surroundings(container=Container.DOCKER)
    )
    assert on_the_host("x", Surroundings()) == "As root: `x`."
    assert on_the_host("x", Surroundings(container=Container.PODMAN)) == "As root on the host: `x`."
