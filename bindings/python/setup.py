"""Puts libd2tp beside the module: of $D2TP_LIBRARY, else of cargo's release build, which is made if need be."""

import os
import pathlib
import shutil
import subprocess

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py
from wheel.bdist_wheel import bdist_wheel

ROOT = pathlib.Path(__file__).resolve().parents[2]


def library():
    said = os.environ.get("D2TP_LIBRARY")
    if said:
        return pathlib.Path(said)
    subprocess.run(["cargo", "build", "--release", "-p", "d2tp-capi"], cwd=ROOT, check=True)
    target = os.environ.get("CARGO_TARGET_DIR", ROOT / "target")
    return pathlib.Path(target) / "release" / "libd2tp.so"


class Build(build_py):
    def run(self):
        super().run()
        folder = pathlib.Path(self.build_lib) / "d2tp"
        shutil.copyfile(library(), folder / "libd2tp.so.1")


class Binary(Distribution):
    """Files of one machine's architecture: auditwheel and pip want to know."""

    def has_ext_modules(self):
        return True


class Wheel(bdist_wheel):
    """Of this machine, and of any Python."""

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    distclass=Binary,
    packages=["d2tp"],
    cmdclass={"build_py": Build, "bdist_wheel": Wheel},
)
