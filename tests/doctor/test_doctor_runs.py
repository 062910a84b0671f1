"""`infinity doctor` on this machine: whole, without io_uring, without rights, without a compiler."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.doctor.trials import run_trial

ROOT = Path(__file__).resolve().parents[2]
AIO_TESTS = ROOT / "tests" / "aio"
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_IPC_LOCK = 1, 2, 14


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), str(AIO_TESTS)])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=200, check=False, **options
    )  # fmt: skip


def checks_until_torch(directory: Path, *, prologue: str = "", **options: object) -> dict[str, dict[str, str]]:
    """Return what the checks find in a process of their own, by name, without loading torch."""
    script = (
        f"{prologue}\nimport json, sys\nfrom pathlib import Path\nfrom infinity.doctor.examine import examine\n"
        "from infinity.doctor.machine import this_machine\nfound = []\n"
        "for finding in examine(this_machine(), [Path(sys.argv[1])]):\n"
        "    found.append(finding.as_json())\n    if finding.name == sys.argv[2]: break\n"
        "print(json.dumps(found))\n"
    )
    done = run("-c", script, str(directory), options.pop("last", "trim"), **options)
    if "no sandbox here" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return {check["name"]: check for check in json.loads(done.stdout)}


def test_this_machine_can_train(tmp_path: Path) -> None:
    """C21: the whole command finds that training can run here, by doing, and leaves nothing in the directories."""
    new = tmp_path / "new"
    done = run("-m", "infinity", "doctor", "--json", "--nvme", str(tmp_path), "--nvme", str(new))
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert (report["can_train"], report["exit_code"]) == (True, 0)
    found = {(check["name"], check["subject"]): check for check in report["checks"]}
    assert found["torch", ""]["state"] in ("ok", "note")
    for directory in (tmp_path, new):
        assert "wrote a file and read it back" in found["io engine", str(directory)]["found"]
    assert "absent so far" in found["directory", str(new)]["found"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    """C31: a file given as directory is refused by the real trial with the storage error's code, and stays as it is."""
    file = tmp_path / "file"
    file.write_text("mine")
    trial = run_trial("infinity.doctor.try_directory", str(file))
    assert trial.refusal is not None
    assert f"{file} is a file, not a directory" in trial.refusal.message
    assert (trial.refusal.exit_code, trial.refusal.errno) == (5, errno.ENOTDIR)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
def test_io_uring_denied_by_seccomp(tmp_path: Path, number: int) -> None:
    """C24: under a real seccomp filter another engine's round trip is found, and a note says what was denied."""
    pytest.importorskip("infinity._aio", reason="built without liburing")
    prologue = f"from sandbox import IO_URING_SETUP, deny\ndeny({number}, IO_URING_SETUP)"
    found = checks_until_torch(tmp_path, prologue=prologue)
    assert found["io engine"]["state"] == "note"
    assert found["io engine"]["found"].startswith("threads: wrote a file and read it back; io_uring cannot be used")
    assert f"errno {number}" in found["io engine"]["found"]
    assert found["io engine"]["remedy"]
    assert found["registration"]["state"] == "ok"
    assert {check["exit_code"] for check in found.values()} == {0}


def without_rights() -> None:
    """Take root's power over files and locked memory from the program that comes next, and lower its limits."""
    libc = ctypes.CDLL(None)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_IPC_LOCK):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused to other users, who do not have it anyway
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))


def test_a_user_without_rights(tmp_path: Path) -> None:
    """C31: a directory that this user may not write to fails with user and mode; nothing else is said about it."""
    mine = tmp_path / "read-only"
    mine.mkdir(mode=0o555)
    found = checks_until_torch(mine, preexec_fn=without_rights, last="directory")
    assert (found["directory"]["state"], found["directory"]["exit_code"]) == ("fails", 5)
    assert f"not writable for user {os.geteuid()} (mode 555)" in found["directory"]["found"]


def test_little_locked_memory(tmp_path: Path) -> None:
    """C27: with 64 KiB of locked memory the limit is a note, and so are the buffers; the engine serves all the same."""
    found = checks_until_torch(tmp_path, preexec_fn=without_rights)
    assert (found["locked memory"]["state"], found["locked memory"]["found"][:9]) == ("note", "64.00 KiB")
    assert "wrote a file and read it back" in found["io engine"]["found"]
    if found["io engine"]["found"].startswith("uring"):
        assert found["registration"]["state"] == "note"
        assert "buffers not registered" in found["registration"]["found"]
    assert {check["exit_code"] for check in found.values()} == {0}


def test_nothing_is_built_and_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    """C21: with an empty PATH, so without any compiler, the lines are the same; no check loads torch or a native module."""
    script = (
        "import os, sys\nos.environ['PATH'] = ''\nfrom pathlib import Path\n"
        "from infinity.doctor.examine import examine\nfrom infinity.doctor.machine import this_machine\n"
        "for finding in examine(this_machine(), [Path(sys.argv[1])]):\n"
        "    assert finding.verdict.exit_code == 0, finding\n"
        "    if finding.name == 'trim': break\n"
        "print(sorted({'torch', 'numpy', 'infinity._aio', 'infinity._cpu_adam'} & set(sys.modules)))\n"
    )
    done = run("-c", script, str(tmp_path))
    assert done.stdout.strip() == "[]", done.stderr


def test_a_broken_installation_is_lines_and_no_traceback(tmp_path: Path) -> None:
    """C21: without native modules, and with a torch and a numpy that do not load, every line is there; exit code 4."""
    package, broken = tmp_path / "package", tmp_path / "broken"
    shutil.copytree(ROOT / "infinity", package / "infinity", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    broken.mkdir()
    (broken / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    (broken / "numpy.py").write_text("raise ImportError('built for another Python\\nread the manual')\n")
    # An editable installation would find the modules where they were built.
    (broken / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')]\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(broken), str(package)]), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-m", "infinity", "doctor", "--json", "--nvme", str(tmp_path)], cwd=broken, env=environment,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert (done.returncode, done.stderr, report["can_train"]) == (4, "", False)
    assert found["io module"]["state"] == "note"
    assert {found[name]["state"] for name in ("adam module", "checksum module")} == {"missing"}
    assert "ImportError: built for another Python" in found["adam kernel"]["found"]
    assert found["io engine"]["found"].startswith("threads: wrote a file and read it back")
    assert found["torch"]["found"] == "torch does not load: OSError: libcudart.so.13: cannot open shared object file"
    assert "cuda" not in found
