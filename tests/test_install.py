"""The package as pip builds it: with a C++ compiler, and without one."""

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILERS = ("c++", "g++", "clang++")
LIBRARY = "longspan/attention/yoso/_cpu.so"


def build_wheel(folder, **environment):
    """Build a wheel from a clean copy of the sources, and unpack it."""
    source, site = folder / "source", folder / "site"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info")
    )
    command = "-m pip -q --disable-pip-version-check wheel --no-deps --no-index"
    done = subprocess.run(
        [sys.executable, *command.split(), "--no-build-isolation", "-w", folder, source],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return wheel.name, site


def run(site, program):
    """Run a program against an unpacked wheel; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROGRAM = """
import torch, longspan
from longspan import doctor
q = torch.randn(1, 2, 30, 16)
print(longspan.__file__)
try:
    print("fused", longspan.yoso(q, q, q, seed=1, impl="fused").shape)
except NotImplementedError as error:
    print(error)
plain = longspan.yoso(q, q, q, seed=1, impl="reference")
print("close" if torch.allclose(longspan.yoso(q, q, q, seed=1), plain, atol=1e-5) else "far")
print(*doctor.examine()["Methods on cpu"], *doctor.examine()["C++ compiler"], sep="\\n")
"""


@pytest.mark.slow
def test_a_compiler_gives_the_kernels(tmp_path):
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip(f"needs a C++ compiler, and there is none of {', '.join(COMPILERS)}")
    start = time.perf_counter()
    name, site = build_wheel(tmp_path)
    assert time.perf_counter() - start < 90
    assert "-py3-none-" in name  # one wheel for every Python
    assert (site / LIBRARY).stat().st_size < 2 << 20
    said = run(site, PROGRAM)
    assert str(site) in said
    assert "fused torch.Size([1, 2, 30, 16])" in said
    assert "close" in said


@pytest.mark.slow
def test_without_a_compiler_it_installs_and_says_what_is_missing(tmp_path):
    missing = str(tmp_path / "no-such-compiler")
    _, site = build_wheel(tmp_path, CC=missing, CXX=missing, LDSHARED=missing, LDCXXSHARED=missing)
    assert not (site / LIBRARY).exists()
    said = run(site, PROGRAM)
    assert str(site) in said
    assert "impl='fused' cannot run: yoso's kernels for the CPU were not built" in said
    assert "close" in said
    assert "reference: yoso's kernels for the CPU were not built" in said
