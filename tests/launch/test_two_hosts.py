"""Two machines, each with an NVMe of its own, train one model: the losses are those of two ranks on one machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_hosts import INTERFACE, Host, two_hosts

ROOT = Path(__file__).resolve().parents[2]
JOB = [
    "--model", "gpt-1m", "--steps", "6", "--seq-len", "64", "--precision", "bf16", "--offload-optimizer", "nvme",
    "--cpu-memory", "600MiB", "--seed", "3",
]  # fmt: skip
PORT = 29517  # in namespaces of their own nobody else has it
LIMIT_SECONDS = 240


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts, or skip where nobody may make them."""
    try:
        context = two_hosts()
        made = context.__enter__()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield made
    finally:
        context.__exit__(None, None, None)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a launcher that this test starts."""
    base = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    return base | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def losses(output: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, gradient norm) of every step of a run, all bits of them."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def on_one_machine(directory: Path) -> list[tuple[int, float, float]]:
    """Train with two ranks here."""
    command = [sys.executable, "-m", "infinity", "train", "--num-ranks", "2", "--nvme", str(directory / "nvme")]
    command += ["--output", str(directory / "run"), *JOB]
    done = subprocess.run(
        command, env=environment(), cwd=directory, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(directory / "run")


def start(host: Host, rendezvous: Host, directory: Path) -> subprocess.Popen[str]:
    """Start torchrun with one rank on a host."""
    directory.mkdir()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
        "--rdzv-endpoint", f"{rendezvous.address}:{PORT}", "--rdzv-id", "two-hosts", "--local-addr", host.address,
        "--rdzv-conf", f"is_host={int(host is rendezvous)}",
        "-m", "infinity", "train", "--nvme", str(directory / "nvme"), "--output", str(directory / "run"), *JOB,
    ]  # fmt: skip
    return host.start(
        command,
        cwd=directory,
        env=environment(GLOO_SOCKET_IFNAME=INTERFACE, TP_SOCKET_IFNAME=INTERFACE),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_SECONDS)
def test_two_hosts_train_what_two_ranks_of_one_do(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """torchrun on each of two hosts, an NVMe directory each: the same losses and norms, bit for bit."""
    expected = on_one_machine(tmp_path)
    directories = [tmp_path / f"host{number}" for number in (1, 2)]
    launchers = [start(host, hosts[0], directory) for host, directory in zip(hosts, directories, strict=True)]
    try:
        said = [launcher.communicate(timeout=LIMIT_SECONDS)[0] for launcher in launchers]
    finally:
        for launcher in launchers:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGTERM)
                launcher.wait(60)
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(said)
    firsts = [directory for directory in directories if (directory / "run" / "metrics.jsonl").exists()]
    assert len(firsts) == 1, "rank 0 alone writes metrics"
    assert len(expected) == 6
    assert losses(firsts[0] / "run") == expected
    assert [list((directory / "nvme").glob("*")) for directory in directories] == [[], []]
