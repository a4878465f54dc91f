"""YOSO as the paper writes it, in plain torch, on any device: the specification of the kernels.

    m  hashes (num_hashes)          x_ij  cosine of query i and key j
    τ  bits of a code (hash_bits)   p_ij  1 − arccos(x_ij)/π, the chance that one bit agrees
    C  buckets, 2^τ                 g     gradient of the output

Forward:   Y_i = 1/m Σ_h Σ_j [c_h(q_i) = c_h(k_j)] v_j,  whose expectation is Σ_j p_ij^τ v_j.
Backward:  dV_j = Σ_i E_ij g_i,  dQ_i = Σ_j W_ij (g_i·v_j) k_j,  dK_j = Σ_i W_ij (g_i·v_j) q_i
with E_ij the share of hashes in which i and j collide (or p_ij^τ), and W_ij = τ/2 · E_ij for the
paper's surrogate gradient or slope(x_ij) · E_ij for the true one.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.base import hide, per_chunk, unit
from longspan.attention.random import Seed
from longspan.attention.yoso.hashing import hash_codes, projections
from longspan.attention.yoso.tables import apply_outer_sums, compact, pair_sums


def yoso(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    num_hashes: int,
    hash_bits: int,
    hashing: str,
    gradient: str,
    backward_hashes: int,
    normalize: bool,
    seed: Seed,
) -> Tensor:
    """Sampled attention; arguments as in `longspan.yoso`."""
    planes = projections(hashing, seed, q.shape[1], q.shape[3], num_hashes, hash_bits, q.device)
    dtype, (q, k, v) = v.dtype, _prepare(q, k, v, key_mask)
    codes = hash_codes(q.detach(), planes), hash_codes(k.detach(), planes)
    y = _Sampled.apply(q, k, v, *codes, hash_bits, gradient, backward_hashes)
    return (unit(y) if normalize else y).to(dtype)


def yoso_expectation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    hash_bits: int,
    gradient: str,
    normalize: bool,
) -> Tensor:
    """The limit of many hashes; arguments as in `longspan.yoso_expectation`."""
    dtype, (q, k, v) = v.dtype, _prepare(q, k, v, key_mask)
    y = _Expected.apply(q, k, v, hash_bits, gradient)
    return (unit(y) if normalize else y).to(dtype)


def collision_probability(cosine: Tensor, hash_bits: int) -> Tensor:
    """p^τ: the chance that two unit vectors share a code of τ random hyperplanes."""
    # Rounding takes cosines past 1, where arccos is NaN.
    return (1 - cosine.clamp(-1, 1).acos() / math.pi) ** hash_bits


def slope(cosine: Tensor, hash_bits: int) -> Tensor:
    """The derivative of p^τ by the cosine, divided by p^τ: τ / (p π √(1 − x²)), at least τ/2.

    The division is what makes the sampled gradient unbiased: a pair that collides with probability
    p^τ carries 1/p^τ of its share.
    """
    # At x = ±1 the slope is infinite but meets a tangent of length √(1 − x²): a floor of rounding
    # size keeps the product finite, and p away from 0 at x = −1.
    floor = 4 * torch.finfo(cosine.dtype).eps
    sine = (1 - cosine.square()).clamp(min=floor).sqrt()
    p = (1 - cosine.clamp(-1, 1).acos() / math.pi).clamp(min=floor)
    return hash_bits / (math.pi * p * sine)


class _Sampled(torch.autograd.Function):
    """1/m Σ_h Σ_j [c_h(q_i) = c_h(k_j)] v_j for unit q and k with codes (B, H, m, N)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cq: Tensor,
        ck: Tensor,
        bits: int,
        gradient: str,
        backward_hashes: int,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, cq, ck)
        ctx.bits, ctx.gradient, ctx.backward_hashes = bits, gradient, backward_hashes
        return pair_sums(*compact(cq, ck, 2**bits), v) / cq.shape[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, cq, ck = ctx.saved_tensors
        m, few = cq.shape[2], ctx.backward_hashes
        # Up to a few thousand tokens, looking at every pair is cheaper than the tables below.
        by_pairs = ctx.gradient == "true" or max(q.shape[2], k.shape[2]) <= 32 * q.shape[3]
        if by_pairs:

            def collisions(rows: slice) -> Tensor:
                count = q.new_zeros(*q[:, :, rows].shape[:3], k.shape[2], dtype=torch.int16)
                for h in range(few):
                    count += cq[:, :, h, rows, None] == ck[:, :, h, None]
                return count.to(q.dtype)

            grads = _pair_gradients(q, k, v, g, collisions, ctx.bits, ctx.gradient)
            dq, dk, dv = (grad / few for grad in grads)
        cq, ck, buckets = compact(cq, ck, 2**ctx.bits)
        if not by_pairs:
            # [same bucket] (g_i·v_j) k_j = (k_j v_jᵀ) g_i: sum a bucket's products, then apply.
            some = cq[:, :, :few], ck[:, :, :few]
            dq = apply_outer_sums(*some, buckets, k, v, g) * (ctx.bits / 2 / few)
            dk = apply_outer_sums(*some[::-1], buckets, q, g, v) * (ctx.bits / 2 / few)
        if not by_pairs or few < m:
            dv = pair_sums(ck, cq, buckets, g) / m
        return dq, dk, dv, None, None, None, None, None


class _Expected(torch.autograd.Function):
    """Σ_j p_ij^τ v_j for unit q and k, a chunk of queries at a time."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bits: int, gradient: str) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.bits, ctx.gradient = bits, gradient
        return torch.cat(
            [collision_probability(q[:, :, rows] @ k.mT, bits) @ v for rows in _chunks(q, k)], dim=2
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors

        def expected(rows: slice) -> Tensor:
            return collision_probability(q[:, :, rows] @ k.mT, ctx.bits)

        return *_pair_gradients(q, k, v, g, expected, ctx.bits, ctx.gradient), None, None


def _pair_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    share: Callable[[slice], Tensor],
    bits: int,
    gradient: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK, dV from the E that `share` gives for a chunk of queries and all keys."""
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in _chunks(q, k):
        e = share(rows)
        w = e * (g[:, :, rows] @ v.mT)
        if gradient == "true":
            w *= slope(q[:, :, rows] @ k.mT, bits)
        dq[:, :, rows] = w @ k
        dk += w.mT @ q[:, :, rows]
        dv += e.mT @ g[:, :, rows]
    return (dq, dk, dv) if gradient == "true" else (dq * (bits / 2), dk * (bits / 2), dv)


def _prepare(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, ...]:
    """Unit queries and keys, masked tokens zero, in float32 at least.

    A masked value of zero leaves every sum over keys as it is, in both passes.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    return unit(q.to(wide)), unit(hide(k, key_mask).to(wide)), hide(v, key_mask).to(wide)


def _chunks(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Slices of the queries whose scores against all keys stay under CHUNK elements."""
    step = per_chunk(q.shape[0] * q.shape[1] * k.shape[2])
    return (slice(i, i + step) for i in range(0, q.shape[2], step))
