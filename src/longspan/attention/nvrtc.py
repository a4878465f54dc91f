"""CUDA C++ compiled at first use by NVRTC, and kept on disk: no nvcc, nothing built at install."""

import ctypes
import functools
import hashlib
import os
import re
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
    """A function (name, grid, block, *arguments) that runs a kernel on the current stream."""
    key = tuple(sorted(defines.items()))

    def run(name: str, grid: int, block: int, *arguments: object) -> None:
        from cuda.core import launch

        device = torch.cuda.current_device()
        stream = _stream(torch.cuda.current_stream(device).cuda_stream, device)
        values = [_value(x) for x in arguments]
        launch(stream, _config(grid, block), _load(source, key, name, device), *values)

    return run


@functools.lru_cache
def _stream(handle: int, device: int) -> Any:
    from cuda.core import Stream

    return Stream.from_handle(handle)


@functools.lru_cache
def _config(grid: int, block: int) -> Any:
    from cuda.core import LaunchConfig

    return LaunchConfig(grid=grid, block=block)


def _value(x: object) -> object:
    """Kernels take addresses and 64-bit integers as Python integers, and 32-bit floats."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, float):
        return ctypes.c_float(x)
    assert x is None or isinstance(x, int)
    return int(x or 0)
