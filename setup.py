"""Builds the two native parts: infinity._aio (C, liburing, cffi) and infinity._cpu_adam (C++17, SIMD, pybind11)."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

HERE = Path(__file__).parent


def aio_modules() -> list[str]:
    """Return the cffi builders to run: none where liburing or cffi is absent, so that the package still builds."""
    if importlib.util.find_spec("cffi") is None:
        sys.stderr.write("infinity._aio is left out: cffi is not installed (thread engine only).\n")
        return []
    if runpy.run_path(str(HERE / "csrc" / "aio" / "build.py"))["find_liburing"]() is None:
        sys.stderr.write("infinity._aio is left out: liburing 2.3 or newer was not found (thread engine only).\n")
        return []
    return ["csrc/aio/build.py:ffibuilder"]


def cpu_adam_modules() -> list[Pybind11Extension]:
    """Return the Adam extension, compiled for the baseline CPU; the SIMD bodies carry their own target attributes."""
    directory = HERE / "csrc" / "cpu_adam"
    sources, headers = (sorted(str(path.relative_to(HERE)) for path in directory.glob(kind)) for kind in ("*.cpp", "*.h"))
    return [
        Pybind11Extension(
            "infinity._cpu_adam", sources, depends=headers, cxx_std=17,
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ]  # fmt: skip


modules = aio_modules()
# Without cffi, setuptools does not know its keyword.
setup(ext_modules=cpu_adam_modules(), cmdclass={"build_ext": build_ext}, **({"cffi_modules": modules} if modules else {}))
