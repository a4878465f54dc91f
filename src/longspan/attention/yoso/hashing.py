"""Locality-sensitive hash codes: the signs of random projections."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention.base import per_chunk
from longspan.attention.random import Seed, gaussian, signs

# Little-endian bytes of 0 or 1, times this, have the byte Σ_t bit_t 2^t on top.
_PACK = 0x0102040810204080


def projections(
    hashing: str,
    seed: Seed,
    heads: int,
    channels: int,
    num_hashes: int,
    hash_bits: int,
    device: torch.device,
) -> Tensor:
    """The vectors that codes project on: (H, num_hashes, hash_bits, D) in float32.

    "gaussian": independent normal vectors, rounded to bfloat16 so that tensor cores multiply them
    without error. "hadamard": rows of products H·D₃·H·D₂·H·D₁ of the
    Hadamard matrix with random signs. Rows of one product are orthogonal, so a code whose bits
    share a product collides too rarely (by up to 59 %); here each bit has a product of its own.
    """
    if hashing == "gaussian":
        planes = gaussian(seed, (heads, num_hashes, hash_bits, channels), device)
        return planes.bfloat16().float()
    width = 1 << (channels - 1).bit_length()
    groups = -(-num_hashes // width)
    d = signs(seed, (heads, groups, hash_bits, 3, 1, width), device)
    h = _hadamard(width, device)
    product = ((h * d[..., 2, :, :]) @ (h * d[..., 1, :, :])) @ (h * d[..., 0, :, :])
    rows = product.transpose(2, 3).flatten(1, 2)  # (H, groups · width, hash_bits, width)
    return rows[:, :num_hashes, :, :channels].contiguous()


def hash_codes(x: Tensor, planes: Tensor) -> Tensor:
    """Codes Σ_t 2^t [x · plane_t > 0] of x (B, H, N, D): (B, H, num_hashes, N), int32."""
    batch, heads, tokens, _ = x.shape
    _, num_hashes, hash_bits, _ = planes.shape
    planes = planes.flatten(1, 2).mT.to(x.dtype)  # (H, D, m · τ)
    step = per_chunk(batch * heads * planes.shape[2])
    codes = torch.empty(batch, heads, num_hashes, tokens, dtype=torch.int32, device=x.device)
    for i in range(0, tokens, step):
        positive = (x[:, :, i : i + step] @ planes) > 0
        codes[..., i : i + step] = _pack(positive.unflatten(-1, (num_hashes, hash_bits))).mT
    return codes


def _pack(bits: Tensor) -> Tensor:
    """(…, τ) booleans → (…) integers Σ_t 2^t bit_t."""
    size = 8 * math.ceil(bits.shape[-1] / 8)
    octets = (F.pad(bits, (0, size - bits.shape[-1])).view(torch.int64) * _PACK >> 56) & 255
    return octets[..., 0] if size == 8 else octets[..., 0] | octets[..., 1] << 8


def _hadamard(width: int, device: torch.device) -> Tensor:
    """Sylvester's orthogonal ±1/√width matrix."""
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < width:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / math.sqrt(width)
