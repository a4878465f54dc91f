"""Runs the CUDA sources on a CPU: emulator.h in place of PTX, a C++ compiler in place of NVRTC."""

import contextlib
import ctypes
import faulthandler
import functools
import os
import re
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from longspan.attention import nvrtc, tape
from longspan.attention.launch import Place, bits

HEADER = Path(__file__).with_name("emulator.h")
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
# Which threads and blocks come first, and whether copies to shared memory arrive at once.
SCHEDULES = {
    "in-order": (0, False),
    "backwards": (1, True),
    "drawn": (5, True),
    "drawn-late": (6, False),
}
schedule = SCHEDULES["in-order"]
MOST_SHARED = 1 << 16  # bytes beside what a kernel declares with a size
OPTIONS = ["-std=c++20", "-O1", "-w", "-fno-strict-aliasing"]
OPTIONS += os.environ.get("EMULATOR_FLAGS", "").split()


@functools.cache
def missing():
    """What keeps the sources from running here; None where they can."""
    if find_spec("triton") is None:
        return "needs triton, from the extra [cuda]"
    if torch.cuda.is_available():
        return "needs Triton's interpreter, which is for machines without a GPU"
    if COMPILER is None:
        return "needs a C++ compiler"
    done = subprocess.run(
        [COMPILER, *OPTIONS, "-fsyntax-only", "-x", "c++", str(HEADER)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return None
    return f"needs a C++ compiler with C++20 and _Float16: {done.stderr[:200]}"


def apart(run, *arguments):
    """What a launch in a process of its own ends with."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        run(*arguments)
        os._exit(0)
    return os.waitpid(child, 0)[1]


@contextlib.contextmanager
def installed(launcher):
    """YOSO's CUDA kernels are what is fused on a CPU meanwhile, launched as on an H200."""
    from longspan.attention.yoso import api, kernels, verbs, verbs_backward

    sources = [verbs._hash, verbs._codes, verbs._tables, verbs._walk]
    sources += [verbs_backward._launch_rows, verbs_backward._outer]
    with contextlib.ExitStack() as stack:
        library = torch.library.Library("longspan", "FRAGMENT")
        stack.callback(library._destroy)
        for op in (kernels.yoso_forward, kernels.yoso_backward):
            library.impl(op.__name__, op, "CPU")
        for source in sources:
            source.cache_clear()
            stack.callback(source.cache_clear)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(nvrtc, "launcher", launcher)
        patch.setattr(verbs_backward, "_cache_bytes", lambda device: 50 << 20)
        patch.setattr(verbs_backward, "_places", lambda device: 8 * 132)
        patch.setattr(kernels, "why_not", lambda device: [])
        patch.setattr(api, "cpu", kernels)
        yield


def launcher(source, **defines):
    """As `nvrtc.launcher`, for tensors on a CPU."""
    library = _library(source, tuple(sorted(defines.items())))

    def run(name, grid, block, *arguments, shared=0):
        assert shared <= MOST_SHARED
        (ctypes.c_uint32 * 2).in_dll(library, "schedule")[:] = schedule
        launch = Launch(getattr(library, f"launch_{name}"), block)
        launch(grid, arguments)
        tape.note(launch, grid, arguments)

    return run


class Launch:
    """As `launch.Launch`: a kernel that can be played again."""

    def __init__(self, function, block):
        self.function, self.block = function, block

    def __call__(self, grid, arguments):
        values = (ctypes.c_int64 * len(arguments))(*map(bits, arguments))
        start = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(arguments))(*range(start, start + 8 * len(arguments), 8))
        self.function(grid, self.block, places)

    def again(self, grid, arguments):
        def launch(bases, addresses):
            self(
                grid,
                [addresses[x.base] + x.offset if type(x) is Place else x for x in arguments],
            )

        return launch


@functools.cache
def _library(source, defines):
    """The source as a shared library, with a function launch_… for each of its kernels."""
    text = "".join(f"#define {name} {value}\n" for name, value in defines) + _text(source)
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder, "source.cpp"), Path(folder, "library.so")
        code.write_text(text)
        seen = _run("-E", code)
        names = dict.fromkeys(re.findall(r'extern "C"\s+void\s+(\w+)\s*\(', seen))
        code.write_text(text + "".join(f"LAUNCH({name})\n" for name in names))
        _run("-shared", "-fPIC", code, "-o", library)
        return ctypes.CDLL(str(library))


def _run(*arguments):
    command = [COMPILER, *OPTIONS, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _text(source):
    """The source with the files it includes."""

    def included(found):
        path = HEADER if found[1] == "ptx.cuh" else source.parent / found[1]
        return path.read_text() if path == HEADER else _text(path)

    text = re.sub(
        r"extern __shared__ ([^\[]+)\[\]", rf"__shared__ \1[{MOST_SHARED}]", source.read_text()
    )
    return re.sub(r'^#include "(.+)"$', included, text, flags=re.MULTILINE)
