"""CUDA C++ compiled at first use by NVRTC, and kept on disk: no nvcc, nothing built at install."""

import ctypes
import functools
import hashlib
import os
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from longspan.attention import tape


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


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


class Launch:
    """A loaded kernel, and room for so many arguments: for one thread, which may use it again."""

    def __init__(self, name: str, handle: int, arguments: int, block: int, shared: int = 0) -> None:
        self.name, self.handle, self.block, self.shared = name, handle, block, shared
        self.values = (ctypes.c_int64 * arguments)()
        start = ctypes.addressof(self.values)
        self.addresses = (ctypes.c_void_p * arguments)(*range(start, start + 8 * arguments, 8))
        self.at = ctypes.addressof(self.addresses)

    def __call__(self, grid: int, arguments: Iterable[object]) -> None:
        """Run it on the current stream; arguments as in `launcher`."""
        self._fill(arguments)
        self._go(grid)

    def again(self, grid: int, arguments: Sequence[Any]) -> tape.Launch:
        """The same with room of its own, filled but for the addresses."""
        run = Launch(self.name, self.handle, len(self.values), self.block, self.shared)
        run._fill(None if type(x) is tape.Place else x for x in arguments)
        slots = [(i, x.base, x.offset) for i, x in enumerate(arguments) if type(x) is tape.Place]
        values = run.values

        def launch(bases: Sequence[torch.Tensor], addresses: Sequence[int]) -> None:
            for slot, base, offset in slots:
                values[slot] = addresses[base] + offset
            run._go(grid)

        return launch

    def _fill(self, arguments: Iterable[object]) -> None:
        self.values[:] = [x if type(x) is int else _bits(x) for x in arguments]

    def _go(self, grid: int) -> None:
        # torch.cuda's own functions for these two take longer than the launch.
        device = torch._C._cuda_getDevice()
        stream = torch._C._cuda_getCurrentRawStream(device)
        error = self._try(grid, stream)
        if error and error.name == "CUDA_ERROR_INVALID_CONTEXT":
            enter(device)  # a new thread may have the number of a dead one
            error = self._try(grid, stream)
        if error:
            raise RuntimeError(f"{self.name} could not be launched: {error.name}")

    def _try(self, grid: int, stream: int) -> Any:
        (error,) = _driver().cuLaunchKernel(
            self.handle, grid, 1, 1, self.block, 1, 1, self.shared, stream, self.at, 0
        )
        return error


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
            found = known[mine] = Launch(name, int(kernel), len(arguments), block, shared)
        found(grid, arguments)
        tape.note(found, grid, arguments)

    return run


def _allow(kernel: Any, shared: int, device: int) -> None:
    """Let a kernel have more than the 48 KB of shared memory that any may have."""
    driver = _driver()
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (error,) = driver.cuKernelSetAttribute(most, shared, kernel, device)
    if error:
        raise RuntimeError(f"{shared} bytes of shared memory are too many: {error.name}")


def enter(device: int) -> None:
    """Give a thread that torch started, and that used no kernel yet, the context of the others."""
    driver = _driver()
    _, context = driver.cuCtxGetCurrent()
    if not int(context):
        _, context = driver.cuDevicePrimaryCtxRetain(device)
        driver.cuCtxSetCurrent(context)


def _bits(x: object) -> int:
    """The bits of an argument; tensors last, since asking whether it is one takes long."""
    if type(x) is float:
        return int.from_bytes(struct.pack("<f", x), "little")
    if x is None or isinstance(x, int):
        return int(x or 0)
    assert isinstance(x, torch.Tensor)
    return x.data_ptr()
