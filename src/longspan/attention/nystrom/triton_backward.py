"""The gradients of the verbs in `triton`: the iteration is run again, kept, and walked back."""

import torch
import triton.language as tl
from torch import Tensor

from longspan.attention.nystrom.triton import (
    Lengths,
    _get,
    _landmark_softmax,
    _matmul,
    _norm,
    _product,
    _put,
    _shared,
    _sizes,
    _step,
)
from longspan.attention.tiles import Kernel, cdiv, load_rows, padded, store_rows


@Kernel
def _unroll(
    q, k, bv, dw, q_length, k_length, norms, scratch, g, dbv, delta, da, dnorm, table_v,
    groups, heads, few, runs, scale,
    GIVEN: tl.constexpr, UNEVEN: tl.constexpr, STEPS: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    """From the parts of the gradient of Z (B v): those of B v, of A, of the norm it starts from."""
    f = tl.arange(0, F)
    ok = f < few
    size: tl.constexpr = F * F
    a = scratch + tl.program_id(0).to(tl.int64) * (STEPS + 9) * size
    x, m2, m3, dm3, dm2 = a + size, a + 2 * size, a + 3 * size, a + 4 * size, a + 5 * size
    dx, dz, part, kept = a + 6 * size, a + 7 * size, a + 8 * size, a + 9 * size
    for head in range(tl.program_id(0), groups, tl.num_programs(0)):
        bh = tl.cast(head, tl.int64)
        p = _landmark_softmax(
            q, k, q_length, k_length, bh, heads, few, scale, a,
            UNEVEN, D, F, K, PRECISION, LOG2E,
        )  # fmt: skip
        norm = tl.load(norms + bh) if GIVEN else _norm(p)
        norm = tl.where(norm == 0, 1.0, norm)
        _put(kept, tl.trans(p) / norm, F)
        for step in range(STEPS):
            z = kept + step * size
            _step(a, z, x, m2, m3, few, F, K, PRECISION)
            young = z + size
            if step == STEPS - 1:
                young = dz  # the result: not needed again once the gradient has started
            _product(z, m3, young, 0.25, 0.0, x, 0.0, few, False, False, False, F, K, PRECISION)

        total = tl.zeros((F, EP), tl.float32)
        at = dw + bh * few * E
        for _ in range(runs):
            total += load_rows(at, f, E, ok, E, EP)
            at += tl.cast(groups, tl.int64) * few * E
        if UNEVEN:
            alone = tl.load(k_length + bh // heads) <= few
            store_rows(table_v + bh * few * E, f, E, ok, tl.where(alone, total, 0.0), E, EP)
            total = tl.where(alone, 0.0, total)
        here = bh * few * E
        store_rows(g + here, f, E, ok, total, E, EP)
        tl.debug_barrier()
        to_bv = _matmul(dz, g + here, F, few, E, 1, F, E, 1, F, EP, K, PRECISION)
        store_rows(dbv + here, f, E, ok, to_bv, E, EP)
        values = load_rows(bv + here, f, E, ok, E, EP)
        tl.store(delta + bh * few + f, tl.sum(to_bv * values, axis=1), mask=ok)
        first = _matmul(g + here, bv + here, few, E, few, E, 1, 1, E, F, F, K, PRECISION)
        _put(dz, first, F)

        to_a = da + bh * size
        _put(to_a, tl.zeros((F, F), tl.float32), F)
        for back in range(STEPS):
            z = kept + (STEPS - 1 - back) * size
            _step(a, z, x, m2, m3, few, F, K, PRECISION)
            _product(z, dz, dm3, 0.25, 0.0, x, 0.0, few, True, False, False, F, K, PRECISION)
            _product(dz, m3, part, 0.25, 0.0, x, 0.0, few, False, True, False, F, K, PRECISION)
            _product(x, dm3, dm2, -1.0, 0.0, x, 0.0, few, True, False, False, F, K, PRECISION)
            _product(dm3, m2, dx, -1.0, 0.0, dm2, -7.0, few, False, True, True, F, K, PRECISION)
            _product(dm2, x, dx, 1.0, 0.0, dx, 1.0, few, False, True, True, F, K, PRECISION)
            _product(x, dm2, dx, 1.0, 0.0, dx, 1.0, few, True, False, True, F, K, PRECISION)
            _product(dx, z, to_a, 1.0, 0.0, to_a, 1.0, few, False, True, True, F, K, PRECISION)
            _product(a, dx, dz, 1.0, 0.0, part, 1.0, few, True, False, True, F, K, PRECISION)
        start = tl.trans(_get(dz, F))
        _put(to_a, _get(to_a, F) + start / norm, F)
        tl.store(dnorm + bh, -tl.sum(tl.sum(start * p, axis=1), axis=0) / (norm * norm))


@Kernel
def _landmark_gradients(
    q, k, da, dnorm, dk, q_length, k_length, scratch, dq, table_k,
    groups, heads, few, runs, keys, scale, UNEVEN: tl.constexpr, DP: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    """Back through the norm and the softmax of A: dq̃, and dk̃ with its other parts, by token."""
    f = tl.arange(0, F)
    ok = f < few
    scratch += tl.program_id(0).to(tl.int64) * F * F
    for head in range(tl.program_id(0), groups, tl.num_programs(0)):
        bh = tl.cast(head, tl.int64)
        a = _landmark_softmax(
            q, k, q_length, k_length, bh, heads, few, scale, scratch,
            UNEVEN, D, F, K, PRECISION, LOG2E,
        )  # fmt: skip
        g = _get(da + bh * F * F, F)
        # A row's sum is 1 whatever its scores: only the largest column of the norm has a gradient.
        columns = tl.sum(a, axis=0)
        highest = (columns == tl.max(columns, axis=0)).to(tl.float32)
        share = tl.load(dnorm + bh) * tl.max(tl.sum(a, axis=1), axis=0) / tl.sum(highest, axis=0)
        g += (highest * share)[None, :]
        _put(scratch, a * (g - tl.sum(a * g, axis=1)[:, None]) * scale, F)
        here = bh * few * D
        to_q = _matmul(scratch, k + here, F, few, D, F, 1, D, 1, F, DP, K, PRECISION)
        store_rows(dq + here, f, D, ok, to_q, D, DP)
        to_k = _matmul(scratch, q + here, F, few, D, 1, F, D, 1, F, DP, K, PRECISION)
        at = dk + here
        for _ in range(runs):
            to_k += load_rows(at, f, D, ok, D, DP)
            at += tl.cast(groups, tl.int64) * few * D
        length = tl.cast(keys, tl.int64)
        if UNEVEN:
            length = tl.load(k_length + bh // heads).to(tl.int64)
        size = tl.maximum(_sizes(length, f, few), 1).to(tl.float32)
        store_rows(table_k + here, f, D, ok, to_k / size[:, None], D, DP)


@Kernel
def _mean_gradients(
    own, parts, length, out, size, heads, few, runs, tokens, UNEVEN: tl.constexpr,
    D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The gradient of a mean, its own and in parts, for each of its tokens."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    there = at < size
    total = tl.load(own + at, mask=there, other=0)
    for _ in range(runs):
        total += tl.load(parts + at, mask=there, other=0)
        parts += size
    row = at // D
    count = tl.cast(tokens, tl.int64)
    if UNEVEN:
        count = tl.load(length + row // few // heads, mask=there, other=1)
    tokens_each = tl.maximum(_sizes(count, row % few, few), 1)
    tl.store(out + at, total / tokens_each.to(tl.float32), mask=there)


def solve_backward(
    q_means: Tensor, k_means: Tensor, bv: Tensor, dw: Tensor, lengths: Lengths,
    given: Tensor | None, num_iterations: int, scale: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """From parts (runs, B, H, F, Dv): gradients of B v, their Δ, those of A and the norm, and of v.

    The first is rounded to a dtype, the last by segment, and zero but where there are no more keys
    than landmarks.
    """
    batch, heads, few, _ = q_means.shape
    programs, scratch, shared = _shared(q_means, dtype, num_iterations + 9)
    g, table_v, dbv = torch.empty_like(bv), torch.empty_like(bv), torch.empty_like(bv, dtype=dtype)
    delta, dnorm = bv.new_empty(batch, heads, few), bv.new_empty(batch, heads)
    da = bv.new_empty(batch, heads, shared["F"], shared["F"])
    _unroll[(programs,)](
        q_means, k_means, bv, dw, *(lengths or (bv, bv)), bv if given is None else given, scratch,
        g, dbv, delta, da, dnorm, table_v, batch * heads, heads, few, dw.shape[0], float(scale),
        GIVEN=given is not None, UNEVEN=lengths is not None, STEPS=num_iterations,
        E=bv.shape[3], EP=padded(bv.shape[3]), **shared,
    )  # fmt: skip
    return dbv, delta, da, dnorm, table_v


def landmark_gradients(
    q_means: Tensor, k_means: Tensor, da: Tensor, dnorm: Tensor, dk: Tensor, lengths: Lengths,
    keys: int, scale: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq̃ through A, and dk̃ through A and from parts (runs, B, H, F, D), over its segment's size."""
    batch, heads, few, channels = q_means.shape
    dq, table_k = torch.empty_like(q_means), torch.empty_like(k_means)
    programs, scratch, shared = _shared(q_means, dtype, 1)
    _landmark_gradients[(programs,)](
        q_means, k_means, da, dnorm, dk, *(lengths or (da, da)), scratch, dq, table_k,
        batch * heads, heads, few, dk.shape[0], keys, float(scale),
        UNEVEN=lengths is not None, DP=padded(channels), **shared,
    )  # fmt: skip
    return dq, table_k


def mean_gradients(own: Tensor, parts: Tensor, length: Tensor | None, tokens: int) -> Tensor:
    """(own + Σ parts) over the sizes of segments: (B, H, F, D) and (runs, B, H, F, D).

    `length` are the valid tokens (B,) where segments are uneven.
    """
    out = torch.empty_like(own)
    _, heads, few, channels = own.shape
    _mean_gradients[(cdiv(own.numel(), 1024),)](
        own, parts, own if length is None else length, out, own.numel(), heads, few,
        parts.shape[0], tokens, UNEVEN=length is not None, D=channels, N=1024, num_warps=4,
    )  # fmt: skip
    return out
