"""CUDA C++ compiled at first use by NVRTC, and kept on disk: no nvcc, nothing built at install."""

import ctypes
import functools
import hashlib
import os
import re
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path.home() / ".cache" / "longspan"


def compile_source(source: Path, defines: tuple[tuple[str, object], ...], arch: str) -> bytes:
    """The binary of a source for an architecture such as "sm_90", from disk or by NVRTC."""
    from cuda.core import Program, ProgramOptions

    text = "".join(f"#define {name} {value}\n" for name, value in defines) + _text(source)
    name = hashlib.sha256(f"{arch}\n{text}".encode()).hexdigest()
    path = cache_folder() / f"{source.stem}-{arch}-{name[:32]}.cubin"
    if path.exists():
        return path.read_bytes()
    options = ProgramOptions(std="c++17", arch=arch, name=source.name)
    binary = Program(text, "c++", options).compile("cubin").code
    assert isinstance(binary, bytes)
    _keep(binary, path)
    return binary


def _text(source: Path) -> str:
    """The source with the files it includes."""
    include = re.compile(r'^#include "(.+)"$', re.MULTILINE)
    return include.sub(lambda found: _text(source.parent / found[1]), source.read_text())


def _keep(binary: bytes, path: Path) -> None:
    """Write aside and move, so that another process sees the whole file or none."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(binary)
        os.replace(file.name, path)
    except OSError:
        return  # nowhere to write: compile again next time


@functools.cache
def _load(source: Path, defines: tuple[tuple[str, object], ...], name: str, device: int) -> Any:
    from cuda.core import ObjectCode

    major, minor = torch.cuda.get_device_capability(device)
    binary = compile_source(source, defines, f"sm_{major}{minor}")
    return ObjectCode.from_cubin(binary).get_kernel(name)


def launcher(source: Path, **defines: object) -> Callable[..., None]:
    """A function (name, grid, block, *arguments) that runs a kernel on the current stream.

    Arguments are tensors, None, integers (64 bits wide in the kernel) and floats (32 bits).
    """
    key = tuple(sorted(defines.items()))
    kernels: dict[tuple[str, int], Any] = {}

    def run(name: str, grid: int, block: int, *arguments: object) -> None:
        from cuda.bindings import driver

        device = torch.cuda.current_device()
        kernel = kernels.get((name, device))
        if kernel is None:
            kernel = kernels[name, device] = _load(source, key, name, device)
        # One 8-byte place an argument, and the address of each: what the driver wants.
        values = (ctypes.c_int64 * len(arguments))(*map(_value, arguments))
        start = ctypes.addressof(values)
        places = (ctypes.c_void_p * len(arguments))(*range(start, start + 8 * len(arguments), 8))
        stream = torch.cuda.current_stream(device).cuda_stream
        sizes = (grid, 1, 1, block, 1, 1)
        (error,) = driver.cuLaunchKernel(
            int(kernel.handle), *sizes, 0, stream, ctypes.addressof(places), 0
        )
        if error:
            raise RuntimeError(f"{source.stem}.{name} could not be launched: {error.name}")

    return run


def _value(x: object) -> int:
    """The bits of an argument."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, float):
        return int.from_bytes(struct.pack("<f", x), "little")
    assert x is None or isinstance(x, int)
    return int(x or 0)
