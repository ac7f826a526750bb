"""Compiles the kernels of `hybridpar.kernels`; without a C compiler, torch's do."""

import sysconfig
from glob import glob

from setuptools import Extension, setup

# Python without a GIL has no limited API to build one wheel for all versions against.
stable = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "hybridpar.kernels._native",
            sorted(glob("src/hybridpar/kernels/native/*.c")),
            depends=["src/hybridpar/kernels/native/native.h"],
            define_macros=[("Py_LIMITED_API", "0x030A0000")] if stable else [],
            # No errno from sqrtf, so that it is vectorised; no fused multiply-add, so that every
            # machine gives the same.
            extra_compile_args=["-std=c99", "-O3", "-fno-math-errno", "-ffp-contract=off"],
            libraries=["m"],
            py_limited_api=stable,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if stable else {},
)
