"""Two network namespaces with a cable between them, as two hosts: one reaches the other by its address only."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

INTERFACE = "cable"


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace and its address on the cable."""

    namespace: str
    address: str

    def start(self, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Start a command on this host; `options` are those of Popen."""
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            ["ip", "netns", "exec", self.namespace, *command], text=True, start_new_session=True, **options
        )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts; needs root and iproute2. Raises CalledProcessError or FileNotFoundError without them."""
    number = os.getpid()
    hosts = tuple(Host(f"infinity-{number}-{side}", f"10.213.7.{side}") for side in (1, 2))
    with ExitStack() as undo:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            undo.callback(_ip, "netns", "delete", host.namespace)
        first, second = hosts
        ends = [f"inf{number % 100_000}-{side}" for side in (1, 2)]  # at most 15 characters
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(hosts, ends, strict=True):
            _ip("link", "set", end, "netns", host.namespace)
            _ip("-n", host.namespace, "link", "set", end, "name", INTERFACE)
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _ip("-n", host.namespace, "link", "set", interface, "up")
        yield first, second


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
