"""Random numbers that are a function of (seed, position): the same on every device.

torch's generators draw differently on CPU and GPU; hashes must not. A counter goes through
three rounds of a 32-bit mixing function, so any implementation can make any number alone.
"""

import math

import torch
from torch import Tensor

Seed = int | Tensor

_LOW = 0xFFFFFFFF


def draw_seed(device: torch.device) -> Seed:
    """Draw a seed from torch's default generator, so that `torch.manual_seed` reproduces a run.

    A GPU need not be asked for it: its generator is a seed and an offset, which are known here. A
    graph that is captured or compiled draws anew whenever it is run, so there the GPU does it.
    """
    if device.type != "cuda" or torch.compiler.is_compiling() or _is_traced():
        return torch.randint(2**62, (), device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)  # as little as a generator allows
    return _mix64(generator.initial_seed() + offset * 0x9E3779B97F4A7C15) >> 2


def _is_traced() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0 or torch.cuda.is_current_stream_capturing()


def bits(seed: Seed, count: int, device: torch.device) -> Tensor:
    """Return `count` uniform 32-bit integers, as int64."""
    x = _mix(torch.arange(count, device=device))
    x = _mix(x ^ (seed & _LOW))
    return _mix(x ^ ((seed >> 32) & _LOW))


def signs(seed: Seed, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return random ±1 of the given shape, in float32."""
    return (bits(seed, math.prod(shape), device) & 1).mul(2).sub(1).float().view(shape)


def gaussian(seed: Seed, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return standard normal numbers of the given shape, in float32 (Box–Muller).

    Worked in float64 and rounded once: devices whose logarithms differ in the last place agree.
    """
    count = math.prod(shape)
    u, w = bits(seed, count + count % 2, device).double().add(1).mul(2**-32).chunk(2)  # in (0, 1]
    radius, angle = (-2 * u.log()).sqrt(), 2 * math.pi * w
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].float().view(shape)


def _mix(x: Tensor) -> Tensor:
    """Scramble 32-bit integers one to one (multiply–xorshift, Wellons' constants)."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def _mix64(x: int) -> int:
    """Scramble a 64-bit integer one to one (the finalizer of splitmix64)."""
    x &= 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)
