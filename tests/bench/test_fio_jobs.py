"""The same job for fio: what it is asked, what its JSON means, and what happens without it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from infinity.bench.fio import LIBAIO, URING, Fio, find_fio, parse_report
from infinity.bench.nvme_jobs import Job, Traffic
from infinity.byte_sizes import MIB
from infinity.errors import PlatformError, StorageError

JOB = Job(Traffic.MIXED, MIB, 32)


def report(**changes: object) -> str:
    """Return a report as fio 3 writes it, as far as it matters."""
    moved = {
        "io_bytes": 3_000_000_000, "bw_bytes": 1_500_000_000,
        "clat_ns": {"max": 9_000_000, "percentile": {"50.000000": 2_000_000, "99.000000": 5_000_000}},
    }  # fmt: skip
    cpu = {"job_runtime": 2000, "usr_cpu": 1.0, "sys_cpu": 2.0}
    return json.dumps({"jobs": [{"error": 0, "mixed": moved | changes} | cpu]})


def stand_in(directory: Path, script: str) -> str:
    """Make a program that stands in for fio."""
    path = directory / "fio"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_report_is_read_in_the_units_of_the_table() -> None:
    """Bytes per second as they are, latencies in microseconds; warnings around the report are passed over."""
    run = parse_report("fio: a warning\n" + report() + "\nanother one", JOB)
    assert (run.bytes_per_second, run.num_bytes) == (1.5e9, 3_000_000_000)
    assert (run.latency_p50_us, run.latency_p99_us, run.latency_max_us) == (2000.0, 5000.0, 9000.0)
    assert run.cpu_seconds == pytest.approx(0.03 * 2.0)
    assert run.cpu_seconds_per_gb == pytest.approx(0.02)


@pytest.mark.parametrize("text", ["", "fio: no such engine", '{"jobs": []}', '{"jobs": [{"error": 0}]}', report(io_bytes=0)])
def test_what_is_no_report_is_an_error(text: str) -> None:
    """A report that is missing, broken or of no bytes never becomes a row (C30)."""
    with pytest.raises(StorageError, match="fio"):
        parse_report(text, JOB)


def test_fio_is_asked_for_the_same_job(tmp_path: Path) -> None:
    """File, length, block, depth, direction and engine are ours; it may make no file and bypasses the page cache."""
    script = f"printf '%s\\n' \"$@\" > {tmp_path}/asked; cat <<'E'\n{report()}\nE"
    fio = Fio(stand_in(tmp_path, script), tmp_path / "a:b", 4 * MIB)
    fio.run(Job(Traffic.READ, 4096, 64), URING, 0.25)
    asked = set((tmp_path / "asked").read_text().splitlines())
    assert asked >= {
        f"--filename={tmp_path}/a\\:b", f"--size={4 * MIB}", "--bs=4096", "--iodepth=64", "--rw=randread", "--direct=1",
        "--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1", "--runtime=250ms", "--allow_file_create=0",
    }  # fmt: skip
    fio.run(JOB, LIBAIO, 1.0)
    assert set((tmp_path / "asked").read_text().splitlines()) >= {"--rw=rw", "--ioengine=libaio", "--bs=1048576"}


def test_fio_gets_huge_pages_like_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc is asked for them, beside what the user asks of it."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    script = f"echo $GLIBC_TUNABLES > {tmp_path}/tunables; cat <<'E'\n{report()}\nE"
    Fio(stand_in(tmp_path, script), tmp_path / "file", 4 * MIB).run(JOB, LIBAIO, 1.0)
    assert (tmp_path / "tunables").read_text() == "glibc.malloc.check=0:glibc.malloc.hugetlb=1\n"


def test_a_failing_fio_is_an_error_with_its_words(tmp_path: Path) -> None:
    """Its last line and the command to try by hand are in the error."""
    fio = Fio(stand_in(tmp_path, "echo first; echo 'engine is not loadable' >&2; exit 1"), tmp_path / "file", 4 * MIB)
    with pytest.raises(StorageError, match="engine is not loadable") as error:
        fio.run(JOB, URING, 1.0)
    assert "--ioengine=io_uring" in error.value.remedy


def test_without_fio_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An absent fio is found before anything is measured."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PlatformError, match="fio is not installed") as error:
        find_fio()
    assert "Install" in error.value.remedy


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_the_real_fio_understands_every_option(tmp_path: Path) -> None:
    """Mixed small blocks and large reads on a file that exists: bytes are moved, no other file appears."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(8 * MIB))
    fio = Fio(find_fio(), path, 8 * MIB)
    run = fio.run(Job(Traffic.MIXED, 4096, 4), LIBAIO, 0.05)
    assert run.num_bytes > 0
    assert run.latency_max_us >= run.latency_p50_us > 0
    assert fio.run(Job(Traffic.READ, MIB, 4), LIBAIO, 0.05, with_latency=False).num_bytes > 0
    assert list(tmp_path.iterdir()) == [path]
