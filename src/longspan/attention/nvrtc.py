"""CUDA C++ compiled at first use by NVRTC, and kept on disk: no nvcc, nothing built at install."""

import functools
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longspan.attention import tape
from longspan.attention.launch import Launch, driver, enter


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
    `shared`: bytes of shared memory beside what the kernel declares with a size, always the same.
    """
    key = tuple(sorted(defines.items()))
    known: dict[tuple[str, int, int, int], Launch] = {}  # by kernel, block, device and thread

    def run(name: str, grid: int, block: int, *arguments: object, shared: int = 0) -> None:
        device = torch._C._cuda_getDevice()
        mine = name, block, device, threading.get_ident()
        found = known.get(mine)
        if found is None:
            kernel = _load(source, key, name, device).handle
            enter(device)
            if shared:
                _allow(kernel, shared, device)
            name = f"{source.stem}.{name}"
            error, function = driver().cuKernelGetFunction(kernel)
            if error:
                raise RuntimeError(f"{name} could not be loaded: {error.name}")
            found = known[mine] = Launch(name, int(function), len(arguments), block, shared)
        found(grid, arguments)
        tape.note(found, grid, arguments)

    return run


def _allow(kernel: Any, shared: int, device: int) -> None:
    """Let a kernel have more than the 48 KB of shared memory that any may have."""
    most = driver().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver().cuKernelSetAttribute(most, shared, kernel, device)
    if error:
        raise RuntimeError(f"{shared} bytes of shared memory are too many: {error.name}")
