"""The verbs of Nyström attention that are its own, in Triton: landmarks, and the iterated inverse.

One program does all of a head's work on matrices of landmarks by landmarks: products of F × F
float32 matrices, one after the other, in registers where the forward has room for them, else in a
scratch of its own that is small enough to stay in the caches.
F is the landmarks padded with zeros to a power of two: zero rows and columns of A stay zero in Z.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.attention.tiles import LOG2E, Kernel, arithmetic, cdiv, load_rows, padded, store_rows

PROGRAMS = 264  # heads at a time, each with its scratch
# By padded landmarks: warps, and the inner length of a product's step.
CONFIGS = {16: (1, 16), 32: (2, 32), 64: (4, 32), 128: (8, 32)}
HELD_WARPS = {16: 1, 32: 4, 64: 8}  # of a solver that keeps them in registers, but for float32
RUN = 1024  # tokens of a program that cuts a sequence
COUNTS = 64  # of runs, that it adds up at a time


@triton.jit
def _sizes(length, j, few):
    """Tokens of segment j when `length` of them are cut into `few`."""
    length = length.to(tl.int64)
    return ((j + 1) * length + few - 1) // few - (j * length + few - 1) // few


@Kernel
def _count(
    mask, counts, first, last, tokens, few, runs,
    MASKED: tl.constexpr, R: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Valid tokens of each run; bounds of segments that may stay empty; a mask where none is."""
    row, run = (tl.program_id(0) // runs).to(tl.int64), tl.program_id(0) % runs
    at = run * R + tl.arange(0, R)
    there = at < tokens
    if MASKED:
        there &= tl.load(mask + row * tokens + at, mask=there, other=0) != 0
    else:
        tl.store(mask + row * tokens + at, there, mask=there)
    tl.store(counts + row * runs + run, tl.sum(there.to(tl.int32), axis=0))
    if run == 0:
        f = tl.arange(0, F)
        tl.store(first + row * few + f, tl.zeros((F,), tl.int64), mask=f < few)
        tl.store(last + row * few + f, tl.zeros((F,), tl.int64), mask=f < few)


@Kernel
def _cut(
    mask, counts, first, last, lengths, there, sizes, segment, tokens, few, runs,
    R: tl.constexpr, C: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """The segment of each token of a run, and the bounds of those that begin or end in it."""
    row, run = (tl.program_id(0) // runs).to(tl.int64), tl.program_id(0) % runs
    length = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for start in range(0, runs, C):
        i = start + tl.arange(0, C)
        count = tl.load(counts + row * runs + i, mask=i < runs, other=0)
        length += tl.sum(count, axis=0)
        before += tl.sum(tl.where(i < run, count, 0), axis=0)
    length = length.to(tl.int64)
    at = run * R + tl.arange(0, R)
    inside = at < tokens
    valid = tl.load(mask + row * tokens + at, mask=inside, other=0) != 0
    rank = (before + tl.cumsum(valid.to(tl.int32), axis=0) - 1).to(tl.int64)
    j = rank * few // tl.maximum(length, 1)
    tl.store(segment + row * tokens + at, tl.where(valid, j, -1).to(tl.int32), mask=inside)
    begins = valid & (rank == (j * length + few - 1) // few)
    ends = valid & (rank + 1 == ((j + 1) * length + few - 1) // few)
    tl.store(first + row * few + j, at.to(tl.int64), mask=begins)
    tl.store(last + row * few + j, at.to(tl.int64) + 1, mask=ends)
    if run == 0:
        f = tl.arange(0, F)
        size = _sizes(length, f, few)
        tl.store(lengths + row, length)
        tl.store(sizes + row * few + f, size, mask=f < few)
        tl.store(there + row * few + f, size > 0, mask=f < few)


def cut(mask: Tensor | None, batch: int, tokens: int, few: int, device: Any) -> tuple[Tensor, ...]:
    """Mask (B, N), where each segment begins and ends (B, F), valid tokens (B,), which segments
    hold any and how many (B, F), the segment of each token (B, N) or −1.

    An empty segment begins and ends at 0.
    """

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    runs = cdiv(tokens, RUN)
    known = make(batch, tokens, dtype=torch.bool) if mask is None else mask.contiguous()
    counts, segment = (make(batch, n, dtype=torch.int32) for n in (runs, tokens))
    first, last, sizes = (make(batch, few, dtype=torch.int64) for _ in range(3))
    length, there = make(batch, dtype=torch.int64), make(batch, few, dtype=torch.bool)
    shared = dict(R=RUN, F=padded(few), num_warps=4)
    _count[(batch * runs,)](
        known, counts, first, last, tokens, few, runs, MASKED=mask is not None, **shared
    )
    _cut[(batch * runs,)](
        known, counts, first, last, length, there, sizes, segment, tokens, few, runs,
        C=COUNTS, **shared,
    )  # fmt: skip
    return known, first, last, length, there, sizes, segment


@Kernel
def _segment_means(
    q, k, q_mask, k_mask, q_first, k_first, q_last, k_last, q_length, k_length, q_out, k_out,
    q_round, k_round, groups, heads, queries, keys, few, q_b, q_h, q_n, k_b, k_h, k_n,
    UNEVEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Queries first, then keys; a program a segment."""
    at = tl.program_id(0)
    x, mask, first, last, length, out, rounded = (
        q, q_mask, q_first, q_last, q_length, q_out, q_round
    )  # fmt: skip
    tokens, stride_b, stride_h, stride_n = queries, q_b, q_h, q_n
    if at >= groups * few:
        at -= groups * few
        x, mask, first, last, length, out, rounded = (
            k, k_mask, k_first, k_last, k_length, k_out, k_round
        )  # fmt: skip
        tokens, stride_b, stride_h, stride_n = keys, k_b, k_h, k_n
    bh, j = (at // few).to(tl.int64), at % few
    if UNEVEN:
        begin = tl.load(first + bh // heads * few + j).to(tl.int32)
        end = tl.load(last + bh // heads * few + j).to(tl.int32)
        size = _sizes(tl.load(length + bh // heads), j, few)
    else:  # from ⌈j tokens / few⌉ on, in 32 bits
        each, over = tokens // few, tokens % few
        begin = j * each + (j * over + few - 1) // few
        end = (j + 1) * each + ((j + 1) * over + few - 1) // few
        size = end - begin
    x += bh // heads * stride_b + bh % heads * stride_h + begin.to(tl.int64) * stride_n
    r = tl.arange(0, R)
    total = tl.zeros((R, DP), tl.float32)
    for start in range(begin, end, R):
        there = start + r < end
        if UNEVEN:
            there &= tl.load(mask + bh // heads * tokens + start + r, mask=there, other=0) != 0
        total += load_rows(x, r, stride_n, there, D, DP).to(tl.float32)
        x += R * stride_n
    d = tl.arange(0, DP)
    mean = tl.sum(total, axis=0) / tl.maximum(size, 1).to(tl.float32)
    here = (bh * few + j) * D + d
    tl.store(out + here, mean, mask=d < D)
    tl.store(rounded + here, mean.to(rounded.dtype.element_ty), mask=d < D)


def segment_means(
    q: Tensor, k: Tensor, few: int, q_cut: Sequence[Tensor] = (), k_cut: Sequence[Tensor] = ()
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Means (B, H, F, D) of queries and of keys, over even runs or as they are cut.

    In float32, and rounded to the dtype of q and k. A cut: mask (B, N), first tokens and last plus
    one (B, F), valid tokens (B,).
    """
    (batch, heads, queries, channels), keys = q.shape, k.shape[2]
    shape = batch, heads, few, channels
    sides = zip(q_cut or [q] * 4, k_cut or [k] * 4, strict=True)
    q_out, k_out, q_round, k_round = (
        torch.empty(shape, dtype=dtype, device=q.device)
        for dtype in (torch.float32, torch.float32, q.dtype, k.dtype)
    )
    size = min(padded(cdiv(max(queries, keys), few)), 64)
    _segment_means[(2 * batch * heads * few,)](
        q, k, *(x for both in sides for x in both), q_out, k_out, q_round, k_round,
        batch * heads, heads, queries, keys, few,
        *q.stride()[:3], *k.stride()[:3], UNEVEN=len(q_cut) > 0,
        D=channels, DP=padded(channels), R=size, num_warps=4 if size == 64 else 2,
    )  # fmt: skip
    return (q_out, k_out), (q_round, k_round)


@triton.jit
def _matmul(
    x, y, rows, inner, columns,
    XI: tl.constexpr, XK: tl.constexpr, YK: tl.constexpr, YJ: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_k x[i XI + k XK] y[k YK + j YJ], (R, C): transposed by exchanging strides."""
    i, j, k = tl.arange(0, R), tl.arange(0, C), tl.arange(0, K)
    total = tl.zeros((R, C), tl.float32)
    for start in range(0, inner, K):
        there = start + k < inner
        left = tl.load(
            x + i[:, None] * XI + (start + k)[None, :] * XK,
            mask=(i < rows)[:, None] & there[None, :],
            other=0,
        )
        right = tl.load(
            y + (start + k)[:, None] * YK + j[None, :] * YJ,
            mask=there[:, None] & (j < columns)[None, :],
            other=0,
        )
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def _put(out, value, F: tl.constexpr):
    """Store a matrix for all threads to read."""
    f = tl.arange(0, F)
    tl.debug_barrier()
    tl.store(out + f[:, None] * F + f[None, :], value)
    tl.debug_barrier()


@triton.jit
def _get(x, F: tl.constexpr):
    f = tl.arange(0, F)
    return tl.load(x + f[:, None] * F + f[None, :])


@triton.jit
def _product(
    x, y, out, factor, diagonal, other, other_factor, few,
    X_T: tl.constexpr, Y_T: tl.constexpr, ADD: tl.constexpr,
    F: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = factor · x y + diagonal · I + other_factor · other, x and y transposed at will.

    `out` may be `other`, but neither x nor y.
    """
    XI: tl.constexpr = 1 if X_T else F
    XK: tl.constexpr = F if X_T else 1
    YK: tl.constexpr = 1 if Y_T else F
    YJ: tl.constexpr = F if Y_T else 1
    f = tl.arange(0, F)
    total = factor * _matmul(x, y, F, few, F, XI, XK, YK, YJ, F, F, K, PRECISION)
    total += tl.where((f[:, None] == f[None, :]) & (f < few)[None, :], diagonal, 0.0)
    if ADD:
        total += other_factor * _get(other, F)
    _put(out, total, F)


@triton.jit
def _landmark_softmax(
    q, k, q_length, k_length, bh, heads, few, scale, out,
    UNEVEN: tl.constexpr, D: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """A = softmax(scale · q̃ k̃ᵀ), with a zero row or column for an empty landmark; kept in `out`."""
    f = tl.arange(0, F)
    q_there = f < few
    k_there = q_there
    if UNEVEN:
        q_there &= _sizes(tl.load(q_length + bh // heads), f, few) > 0
        k_there &= _sizes(tl.load(k_length + bh // heads), f, few) > 0
    at = bh * few * D
    score = _matmul(q + at, k + at, few, D, few, D, 1, 1, D, F, F, K, PRECISION)
    score = tl.where(k_there[None, :], score * (scale * LOG2E), -float("inf"))
    top = tl.max(score, axis=1)
    p = tl.exp2(score - tl.where(top == -float("inf"), 0.0, top)[:, None])
    mass = tl.sum(p, axis=1)
    p = p / tl.where(mass == 0, 1.0, mass)[:, None]
    p = tl.where(q_there[:, None], p, 0.0)
    _put(out, p, F)
    return p


@triton.jit
def _norm(a):
    """‖A‖₁ ‖A‖∞."""
    return tl.max(tl.sum(a, axis=0), axis=0) * tl.max(tl.sum(a, axis=1), axis=0)


@triton.jit
def _step(
    a, z, x, m2, m3, few, F: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """X = A Z, M₂ = 15 I − X (7 I − X) and M₃ = 13 I − X M₂."""
    _product(a, z, x, 1.0, 0.0, x, 0.0, few, False, False, False, F, K, PRECISION)
    _product(x, x, m2, 1.0, 15.0, x, -7.0, few, False, False, True, F, K, PRECISION)
    _product(x, m2, m3, -1.0, 13.0, x, 0.0, few, False, False, False, F, K, PRECISION)


@Kernel
def _norms(
    q, k, q_length, k_length, scratch, out, groups, heads, few, scale, UNEVEN: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    scratch += tl.program_id(0).to(tl.int64) * F * F
    for head in range(tl.program_id(0), groups, tl.num_programs(0)):
        bh = tl.cast(head, tl.int64)
        a = _landmark_softmax(
            q, k, q_length, k_length, bh, heads, few, scale, scratch,
            UNEVEN, D, F, K, PRECISION, LOG2E,
        )  # fmt: skip
        tl.store(out + bh, _norm(a))


@Kernel
def _solve(
    q, k, bv, v, q_length, k_length, first, norms, scratch, out, groups, heads, few, scale,
    v_b, v_h, v_n, GIVEN: tl.constexpr, UNEVEN: tl.constexpr, STEPS: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, HELD: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    """Z (B v) of a head; the values themselves where every key is a landmark."""
    f = tl.arange(0, F)
    a = scratch + tl.program_id(0).to(tl.int64) * 6 * F * F
    z, new, x, m2, m3 = a + F * F, a + 2 * F * F, a + 3 * F * F, a + 4 * F * F, a + 5 * F * F
    for head in range(tl.program_id(0), groups, tl.num_programs(0)):
        bh = tl.cast(head, tl.int64)
        p = _landmark_softmax(
            q, k, q_length, k_length, bh, heads, few, scale, a,
            UNEVEN, D, F, K, PRECISION, LOG2E,
        )  # fmt: skip
        norm = tl.load(norms + bh) if GIVEN else _norm(p)
        start = tl.trans(p) / tl.where(norm == 0, 1.0, norm)
        if HELD:  # as `_step`; what is zero beyond the landmarks stays zero
            same = f[:, None] == f[None, :]
            for _ in range(STEPS):
                az = tl.dot(p, start, input_precision=PRECISION)
                inner = tl.where(same, 15.0, 0.0) - 7 * az
                inner = tl.dot(az, az, inner, input_precision=PRECISION)
                outer = tl.where(same, 13.0, 0.0) - tl.dot(az, inner, input_precision=PRECISION)
                start = 0.25 * tl.dot(start, outer, input_precision=PRECISION)
            values = load_rows(bv + bh * few * E, f, E, f < few, E, EP)
            result = tl.dot(start, values, input_precision=PRECISION)
        else:
            _put(z, start, F)
            for _ in range(STEPS):
                _step(a, z, x, m2, m3, few, F, K, PRECISION)
                _product(z, m3, new, 0.25, 0.0, x, 0.0, few, False, False, False, F, K, PRECISION)
                z, new = new, z
            result = _matmul(z, bv + bh * few * E, F, few, E, F, 1, E, 1, F, EP, K, PRECISION)
        if UNEVEN:
            length = tl.load(k_length + bh // heads)
            there = (f < tl.where(length <= few, few, 0)) & (_sizes(length, f, few) > 0)
            row = tl.load(first + bh // heads * few + f, mask=there, other=0).to(tl.int64)
            own = load_rows(v + bh // heads * v_b + bh % heads * v_h, row, v_n, there, E, EP)
            result = tl.where(length <= few, own.to(tl.float32), result)
        store_rows(out + bh * few * E, f, E, f < few, result, E, EP)


Lengths = tuple[Tensor, Tensor] | None


def _shared(q_means: Tensor, dtype: torch.dtype, matrices: int) -> tuple[int, Tensor, dict]:
    """Programs, their scratch, and what every kernel here is told."""
    batch, heads, few, channels = q_means.shape
    size = padded(few)
    warps, inner = CONFIGS[size]
    programs = min(PROGRAMS, batch * heads)
    options = dict(
        D=channels, F=size, K=16 if dtype == torch.float32 else inner,
        PRECISION=arithmetic(dtype), LOG2E=LOG2E,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
    return programs, q_means.new_empty(programs, matrices, size, size), options


def norms(
    q_means: Tensor, k_means: Tensor, lengths: Lengths, scale: float, dtype: torch.dtype
) -> Tensor:
    """‖A‖₁ ‖A‖∞ of every head, (B, H)."""
    batch, heads, few, _ = q_means.shape
    out = q_means.new_empty(batch, heads)
    programs, scratch, shared = _shared(q_means, dtype, 1)
    _norms[(programs,)](
        q_means, k_means, *(lengths or (out, out)), scratch, out, batch * heads, heads, few,
        float(scale), UNEVEN=lengths is not None, **shared,
    )  # fmt: skip
    return out


def solve(
    q_means: Tensor, k_means: Tensor, bv: Tensor, v: Tensor, lengths: Lengths,
    first: Tensor | None, given: Tensor | None, num_iterations: int, scale: float,
) -> Tensor:  # fmt: skip
    """Z (B v), (B, H, F, Dv) in the dtype of v.

    `given` is the norm (B, H) to start from, if not its own. `lengths` are the valid queries and
    keys (B,) where segments are uneven, and `first` the first token of each segment of keys: with
    no more keys than landmarks, values take their place.
    """
    batch, heads, few, _ = q_means.shape
    out = torch.empty_like(bv, dtype=v.dtype)
    programs, scratch, shared = _shared(q_means, v.dtype, 6)
    held = shared["F"] in HELD_WARPS and shared["PRECISION"] != "ieee"
    if held:
        shared["num_warps"] = HELD_WARPS[shared["F"]]
    _solve[(programs,)](
        q_means, k_means, bv, v, *(lengths or (out, out)), out if first is None else first,
        out if given is None else given, scratch, out, batch * heads, heads, few, float(scale),
        *v.stride()[:3], GIVEN=given is not None, UNEVEN=lengths is not None,
        STEPS=num_iterations, E=bv.shape[3], EP=padded(bv.shape[3]), HELD=held, **shared,
    )  # fmt: skip
    return out
