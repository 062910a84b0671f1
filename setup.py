"""Builds the native parts: infinity._aio (C, liburing, cffi), infinity._cpu_adam and infinity._crc32c (C++17, pybind11)."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
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


def simd_module(name: str, compile_args: Sequence[str] = (), link_args: Sequence[str] = ()) -> Pybind11Extension:
    """Return the extension of csrc/`name`, compiled for the baseline CPU; SIMD bodies carry their own target attributes."""
    directory = HERE / "csrc" / name
    sources, headers = (sorted(str(path.relative_to(HERE)) for path in directory.glob(kind)) for kind in ("*.cpp", "*.h"))
    headers.append("csrc/kernels.h")
    return Pybind11Extension(
        f"infinity._{name}", sources, depends=headers, cxx_std=17,
        extra_compile_args=["-O3", *compile_args], extra_link_args=list(link_args),
    )  # fmt: skip


extensions = [
    simd_module("cpu_adam", ["-ffp-contract=off", "-fno-math-errno", "-pthread"], ["-pthread"]),
    simd_module("crc32c"),
]
modules = aio_modules()
# Without cffi, setuptools does not know its keyword.
setup(ext_modules=extensions, cmdclass={"build_ext": build_ext}, **({"cffi_modules": modules} if modules else {}))
