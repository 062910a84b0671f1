"""Builds the two native parts: infinity._aio (C, liburing, cffi) and infinity._cpu_adam (C++17, SIMD, pybind11)."""

from __future__ import annotations

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup

HERE = Path(__file__).parent


def aio_modules() -> list[str]:
    """Return the cffi builders to run: none where liburing is absent, so that the package still builds."""
    builder = HERE / "csrc" / "aio" / "build.py"
    return [f"{builder.relative_to(HERE)}:ffibuilder"] if builder.exists() else []


def cpu_adam_modules() -> list[Pybind11Extension]:
    """Return the Adam extension, compiled for the baseline CPU; the SIMD bodies carry their own target attributes."""
    sources = sorted(str(path.relative_to(HERE)) for path in (HERE / "csrc" / "cpu_adam").glob("*.cpp"))
    if not sources:
        return []
    return [
        Pybind11Extension(
            "infinity._cpu_adam", sources, cxx_std=17,
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
            extra_link_args=["-pthread"],
        )
    ]  # fmt: skip


setup(ext_modules=cpu_adam_modules(), cmdclass={"build_ext": build_ext}, cffi_modules=aio_modules())
