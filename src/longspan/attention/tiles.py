"""What the Triton kernels share: tiles of rows, and how the host hands them over.

A kernel sees x (B, H, N, D) through the pointer to a head and the stride of its rows; channels lie
next to each other and are padded to DP, a power of two, with zeros.
"""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.attention import tape
from longspan.attention.launch import Again, Launch, Place, enter

LOG2E = math.log2(math.e)  # softmaxes are taken in powers of two
INTERPRETED = triton.knobs.runtime.interpret  # on the CPU, where there is no PTX
NUMBERS = (int, float)  # asking whether something is a tensor takes longer
MOST_KNOWN = 1024  # sets of arguments that a kernel remembers


class Kernel:
    """A Triton kernel that remembers what was compiled for which arguments.

    Triton asks itself anew at every launch, which takes longer than the launch. Constants come last
    in the kernel, and by name in the call.
    """

    def __init__(self, function: Callable) -> None:
        self.jit = triton.jit(function)
        self.known: dict[tuple, Compiled] = {}
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        """The kernel with so many programs, to be called with its arguments."""
        return functools.partial(self._interpret if INTERPRETED else self._launch, grid)

    def _launch(self, grid: tuple[int], *arguments: Any, **options: Any) -> None:
        # Triton's code depends on no more than this; room for arguments is each thread's own.
        seen = [x if type(x) in NUMBERS else (x.dtype, x.data_ptr() % 16) for x in arguments]
        key = (threading.get_ident(), arguments[0].device, *seen, *options.items())
        found = self.known.get(key)
        if found is not None:
            found.launch(grid[0], arguments)
        else:
            compiled = self.jit[grid](*arguments, **options)
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            found = self.known[key] = Compiled(compiled, self.jit.arg_names, arguments)
        tape.note(found, grid[0], arguments)

    def _interpret(self, grid: tuple[int], *arguments: Any, **options: Any) -> None:
        with tape.unseen():  # the interpreter works with torch
            self.jit[grid](*arguments, **options)
        tape.note(Interpreted(self.jit, options), grid[0], arguments)


class Compiled:
    """What Triton compiled for some arguments, launched through the driver."""

    def __init__(self, compiled: Any, names: Sequence[str], arguments: Sequence[Any]) -> None:
        signature, metadata = compiled.src.signature, compiled.metadata
        assert not metadata.global_scratch_size, "no kernel here asks Triton for memory"
        # Constants, and integers of one, are part of the code; two pointers to Triton's own memory,
        # which is none, follow the arguments.
        self.places = [i for i in range(len(arguments)) if signature[names[i]] != "constexpr"]
        threads, count = 32 * metadata.num_warps, len(self.places) + 2
        self.run = Launch(metadata.name, compiled.function, count, threads, metadata.shared)
        enter(arguments[0].device.index)

    def launch(self, grid: int, arguments: Sequence[Any]) -> None:
        """Run it on the current stream."""
        self.run(grid, self._mine(arguments))

    def again(self, grid: int, arguments: Sequence[Any]) -> Again:
        """As `Launch.again`."""
        return self.run.again(grid, self._mine(arguments))

    def _mine(self, arguments: Sequence[Any]) -> list[Any]:
        return [*[arguments[i] for i in self.places], None, None]


class Interpreted:
    """A kernel in Triton's interpreter, which takes tensors for addresses."""

    def __init__(self, jit: Any, options: dict[str, Any]) -> None:
        self.jit, self.options = jit, options

    def again(self, grid: int, arguments: Sequence[Any]) -> tape.Play:
        """As `Compiled.again`."""

        def launch(bases: Sequence[Tensor], addresses: Sequence[int]) -> None:
            there = [at(bases, x) if type(x) is Place else x for x in arguments]
            self.jit[(grid,)](*there, **self.options)

        def at(bases: Sequence[Tensor], place: Place) -> Tensor:
            base, like = bases[place.base], place.like
            first = base.storage_offset() * base.element_size() + place.offset
            x = torch.empty(0, dtype=like.dtype)
            first //= like.element_size()
            return x.set_(base.untyped_storage(), first, like.shape, like.stride())

        return launch


@triton.jit
def load_rows(at, row, stride, there, D: tl.constexpr, DP: tl.constexpr):
    """Rows (R, DP) of a head, zero where not there: what is not there is never read."""
    d = tl.arange(0, DP)
    where = at + row[:, None] * stride + d[None, :]
    if D == DP:
        return tl.load(where, mask=there[:, None], other=0)
    return tl.load(where, mask=there[:, None] & (d[None, :] < D), other=0)


@triton.jit
def store_rows(at, row, stride, there, value, D: tl.constexpr, DP: tl.constexpr):
    """Write rows (R, DP) of a head."""
    d = tl.arange(0, DP)
    where = at + row[:, None] * stride + d[None, :]
    mask = there[:, None] & (d[None, :] < D)
    tl.store(where, value.to(at.dtype.element_ty), mask=mask)


@triton.jit
def inverse_length(x):
    """1/‖x‖ of rows in float32; zero for a zero row."""
    x = x.to(tl.float32)
    square = tl.sum(x * x, axis=1)
    return tl.where(square > 0, tl.rsqrt(tl.where(square > 0, square, 1.0)), 0.0)


@triton.jit
def through_unit(g, x, inverse):
    """The gradient of rows x from that of x/‖x‖: (g − (g·u) u) / ‖x‖."""
    u = x.to(tl.float32) * inverse[:, None]
    return (g - tl.sum(g * u, axis=1)[:, None] * u) * inverse[:, None]


@Kernel
def _add_parts(parts, out, size, runs, N: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    there = at < size
    total = tl.zeros((N,), tl.float32)
    for _ in range(runs):
        total += tl.load(parts + at, mask=there, other=0)
        parts += size
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


def add_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension of dense parts, in a dtype."""
    runs, *shape = parts.shape
    if runs == 1 and parts.dtype == dtype:
        return parts[0]
    out = torch.empty(shape, dtype=dtype, device=parts.device)
    _add_parts[(cdiv(out.numel(), 1024),)](parts, out, out.numel(), runs, N=1024, num_warps=4)
    return out


def rows(x: Tensor) -> Tensor:
    """x itself where its channels lie next to each other, on 16-byte words if it can, else a copy.

    A stride that is a multiple of 16 bytes lets Triton read whole words.
    """
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# Triton's own of these two, which are for kernels too, take microseconds.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def padded(channels: int) -> int:
    """Channels padded to what matrix instructions take."""
    return max(16, 1 << (channels - 1).bit_length())


def arithmetic(dtype: torch.dtype) -> str:
    """How float32 operands are multiplied: exactly, unless their digits are those of float16."""
    return "ieee" if dtype == torch.float32 else "tf32x3"
