"""Build the wheel into a directory and try it where there is neither a compiler nor liburing."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What a Linux machine that runs torch has anyway. Anything else would have to be installed beside the wheel.
EXPECTED_LIBRARIES = (
    "linux-vdso",
    "ld-linux",
    "libc.",
    "libm.",
    "libstdc++.",
    "libgcc_s.",
    "libpthread.",
    "libdl.",
    "librt.",
)
TRIAL = """
import sys
from pathlib import Path
import infinity, infinity._cpu_adam, infinity._crc32c
from infinity.aio.select import probe
installed = Path(infinity.__file__).parent
assert installed.is_relative_to(sys.argv[1]), installed
if any(installed.glob("_aio.*")):
    import infinity._aio
print("engine:", probe(Path(sys.argv[1])).engine)
"""


def build(destination: Path) -> Path:
    """Build the wheel in isolation, with the pinned build requirements and without what earlier builds left behind."""
    for leftover in (*ROOT.glob("build/lib*"), *ROOT.glob("build/bdist*")):
        shutil.rmtree(leftover)
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    before = set(destination.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(destination), str(ROOT)]
    subprocess.run(command, env=environment, check=True)
    return max(destination.glob("*.whl"), key=lambda path: (path not in before, path.stat().st_mtime))


def foreign_libraries(directory: Path) -> list[str]:
    """Return the shared libraries that the native modules need beyond the expected ones."""
    listings = [
        subprocess.run(["ldd", module], check=True, capture_output=True, text=True).stdout
        for module in directory.rglob("*.so")
    ]
    names = {Path(line.split()[0]).name for listing in listings for line in listing.splitlines()}
    return sorted(name for name in names if not name.startswith(EXPECTED_LIBRARIES))


def main() -> int:
    """Build, install into an empty directory, and use the native modules and the doctor with an empty PATH."""
    destination = Path(sys.argv[1]).resolve()
    wheel = build(destination)
    with tempfile.TemporaryDirectory() as temporary:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", temporary, str(wheel)]
        subprocess.run(install, check=True)
        if foreign := foreign_libraries(Path(temporary)):
            sys.stderr.write(f"{wheel.name} needs {', '.join(foreign)} where it is installed.\n")
            return 1
        environment = {"PATH": "", "PYTHONPATH": os.pathsep.join([temporary, os.environ.get("PYTHONPATH", "")])}
        trial = [sys.executable, "-c", TRIAL, temporary]
        subprocess.run(trial, cwd=temporary, env=environment, check=True)
        doctor = [sys.executable, "-m", "infinity", "doctor", "--nvme", temporary]
        subprocess.run(doctor, cwd=temporary, env=environment, check=True, stdout=subprocess.DEVNULL)
    sys.stdout.write(f"{wheel}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
