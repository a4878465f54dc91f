"""Window attention in Triton: each tile of queries visits the tiles of keys its window reaches."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.attention.tiles import LOG2E, Kernel, arithmetic, cdiv, load_rows, padded, store_rows


@dataclass(frozen=True)
class Config:
    """Queries and keys of a tile, and how Triton runs it."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By pass, bytes of an element and padded channels: tiles that fit registers and shared memory.
CONFIGS: dict[tuple[str, int, int], Config] = {
    ("forward", 2, 64): Config(128, 64, 4, 3),
    ("forward", 2, 128): Config(128, 64, 8, 2),
    ("forward", 2, 256): Config(64, 64, 8, 1),
    ("forward", 4, 64): Config(32, 32, 4, 1),
    ("forward", 4, 128): Config(16, 32, 4, 1),
    ("forward", 4, 256): Config(16, 16, 4, 1),
    ("queries", 2, 64): Config(128, 64, 8, 2),
    ("queries", 2, 128): Config(64, 64, 8, 2),
    ("queries", 2, 256): Config(64, 32, 8, 1),
    ("queries", 4, 64): Config(32, 32, 4, 1),
    ("queries", 4, 128): Config(16, 32, 4, 1),
    ("queries", 4, 256): Config(16, 16, 4, 1),
    ("keys", 2, 64): Config(64, 128, 8, 2),
    ("keys", 2, 128): Config(32, 128, 8, 2),
    ("keys", 2, 256): Config(32, 64, 8, 1),
    ("keys", 4, 64): Config(32, 32, 4, 1),
    ("keys", 4, 128): Config(16, 32, 4, 1),
    ("keys", 4, 256): Config(16, 16, 4, 1),
}


def choose(verb: str, dtype: torch.dtype, *channels: int) -> Config:
    """The configuration of a pass for rows of a dtype and width."""
    return CONFIGS[verb, dtype.itemsize, max(64, *(padded(n) for n in channels))]


@triton.jit
def _reach(first, window, others, SIZE: tl.constexpr, STEP: tl.constexpr):
    """Where the tiles of STEP others begin and end that SIZE places from `first` on can see."""
    begin = tl.maximum(first - window, 0) // STEP * STEP
    end = tl.minimum(first + SIZE + window, others)
    return begin, end


@Kernel
def _attend(
    q, k, v, mask, y, lse, heads, queries, keys, window, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, M)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * M
    m, n = tl.arange(0, M), tl.arange(0, N)
    begin, end = _reach(first, window, keys, M, N)
    q += bh // heads * q_b + bh % heads * q_h + first.to(tl.int64) * q_n
    k += bh // heads * k_b + bh % heads * k_h + begin.to(tl.int64) * k_n
    v += bh // heads * v_b + bh % heads * v_h + begin.to(tl.int64) * v_n
    mask += bh // heads * keys
    there = first + m < queries
    query = load_rows(q, m, q_n, there, D, DP)
    top = tl.full((M,), -float("inf"), tl.float32)
    mass = tl.zeros((M,), tl.float32)
    total = tl.zeros((M, EP), tl.float32)
    for start in range(begin, end, N):
        seen = start + n < keys
        if MASKED:
            seen &= tl.load(mask + start + n, mask=seen, other=0) != 0
        key = load_rows(k, n, k_n, seen, D, DP)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        away = (first + m)[:, None] - (start + n)[None, :]
        near = (tl.abs(away) <= window) & seen[None, :]
        score = tl.where(near, score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(top - safe)
        mass = mass * shrink + tl.sum(p, axis=1)
        value = load_rows(v, n, v_n, seen, E, EP)
        total = tl.dot(p.to(value.dtype), value, total * shrink[:, None], input_precision=PRECISION)
        top = higher
        k += N * k_n
        v += N * v_n
    row = bh * queries + first + m
    blind = mass == 0
    store_rows(y, row, E, there, total / tl.where(blind, 1.0, mass)[:, None], E, EP)
    # Of a query that sees nothing, +∞: its weights are 2^−∞ in the backward.
    safe = tl.where(blind, float("inf"), top + tl.log2(tl.where(blind, 1.0, mass)))
    tl.store(lse + row, safe, mask=there)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int, scale: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output (B, H, Nq, Dv), and the log₂-sum-exp (B, H, Nq) of its softmax."""
    batch, heads, queries, channels = q.shape
    keys, width = v.shape[2:]
    config = config or choose("forward", v.dtype, channels, width)
    y = v.new_empty(batch, heads, queries, width)
    lse = v.new_empty((batch, heads, queries), dtype=torch.float32)
    _attend[(cdiv(queries, config.queries) * batch * heads,)](
        q, k, v, v if mask is None else mask, y, lse, heads, queries, keys, window, scale * LOG2E,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        D=channels, DP=padded(channels), E=width, EP=padded(width), MASKED=mask is not None,
        PRECISION=arithmetic(v.dtype), M=config.queries, N=config.keys,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return y, lse


@Kernel
def _query_gradients(
    q, k, v, g, mask, y, lse, delta, dq, heads, queries, keys, window, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M rows of dQ, and their Δ = g·y for the keys' pass."""
    blocks = tl.cdiv(queries, M)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * M
    m, n = tl.arange(0, M), tl.arange(0, N)
    begin, end = _reach(first, window, keys, M, N)
    q += bh // heads * q_b + bh % heads * q_h + first.to(tl.int64) * q_n
    k += bh // heads * k_b + bh % heads * k_h + begin.to(tl.int64) * k_n
    v += bh // heads * v_b + bh % heads * v_h + begin.to(tl.int64) * v_n
    mask += bh // heads * keys
    there = first + m < queries
    row = bh * queries + first + m
    query = load_rows(q, m, q_n, there, D, DP)
    grad = load_rows(g, row, E, there, E, EP)
    out = load_rows(y, row, E, there, E, EP).to(tl.float32)
    mean = tl.sum(out * grad.to(tl.float32), axis=1)
    tl.store(delta + row, mean, mask=there)
    norm = tl.load(lse + row, mask=there, other=float("inf"))
    total = tl.zeros((M, DP), tl.float32)
    for start in range(begin, end, N):
        seen = start + n < keys
        if MASKED:
            seen &= tl.load(mask + start + n, mask=seen, other=0) != 0
        key = load_rows(k, n, k_n, seen, D, DP)
        value = load_rows(v, n, v_n, seen, E, EP)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2E)
        inside = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        away = (first + m)[:, None] - (start + n)[None, :]
        near = (tl.abs(away) <= window) & seen[None, :]
        p = tl.where(near, tl.exp2(score - norm[:, None]), 0.0)
        s = p * (inside - mean[:, None])
        total = tl.dot(s.to(key.dtype), key, total, input_precision=PRECISION)
        k += N * k_n
        v += N * v_n
    store_rows(dq, row, D, there, total * scale, D, DP)


@Kernel
def _key_gradients(
    q, k, v, g, mask, lse, delta, dk, dv, heads, queries, keys, window, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, LOG2E: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N rows of dK and dV: tiles are transposed, so that products take them from registers."""
    blocks = tl.cdiv(keys, N)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * N
    m, n = tl.arange(0, M), tl.arange(0, N)
    begin, end = _reach(first, window, queries, N, M)
    q += bh // heads * q_b + bh % heads * q_h + begin.to(tl.int64) * q_n
    k += bh // heads * k_b + bh % heads * k_h + first.to(tl.int64) * k_n
    v += bh // heads * v_b + bh % heads * v_h + first.to(tl.int64) * v_n
    there = first + n < keys
    seen = there
    if MASKED:
        seen &= tl.load(mask + bh // heads * keys + first + n, mask=there, other=0) != 0
    key = load_rows(k, n, k_n, seen, D, DP)
    value = load_rows(v, n, v_n, seen, E, EP)
    to_key = tl.zeros((N, DP), tl.float32)
    to_value = tl.zeros((N, EP), tl.float32)
    for start in range(begin, end, M):
        real = start + m < queries
        row = bh * queries + start + m
        query = load_rows(q, m, q_n, real, D, DP)
        grad = load_rows(g, row, E, real, E, EP)
        norm = tl.load(lse + row, mask=real, other=float("inf"))
        mean = tl.load(delta + row, mask=real, other=0)
        score = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * LOG2E)
        inside = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
        away = (first + n)[:, None] - (start + m)[None, :]
        near = (tl.abs(away) <= window) & seen[:, None]
        p = tl.where(near, tl.exp2(score - norm[None, :]), 0.0)
        to_value = tl.dot(p.to(grad.dtype), grad, to_value, input_precision=PRECISION)
        s = p * (inside - mean[None, :])
        to_key = tl.dot(s.to(query.dtype), query, to_key, input_precision=PRECISION)
        q += M * q_n
    row = bh * keys + first + n
    store_rows(dk, row, D, there, to_key * scale, D, DP)
    store_rows(dv, row, E, there, to_value, E, EP)


def gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, y: Tensor, lse: Tensor,
    window: int, scale: float, configs: tuple[Config, Config] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV; g and y are contiguous."""
    batch, heads, queries, channels = q.shape
    keys, width = v.shape[2:]
    by_query, by_key = configs or (
        choose(verb, v.dtype, channels, width) for verb in ("queries", "keys")
    )
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta, some = torch.empty_like(lse), v if mask is None else mask
    sizes = heads, queries, keys, window, float(scale)
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    shared = dict(
        D=channels, DP=padded(channels), E=width, EP=padded(width), MASKED=mask is not None,
        PRECISION=arithmetic(v.dtype), LOG2E=LOG2E,
    )  # fmt: skip
    _query_gradients[(cdiv(queries, by_query.queries) * batch * heads,)](
        q, k, v, g, some, y, lse, delta, dq, *sizes, *strides, **shared,
        M=by_query.queries, N=by_query.keys,
        num_warps=by_query.num_warps, num_stages=by_query.num_stages,
    )  # fmt: skip
    _key_gradients[(cdiv(keys, by_key.keys) * batch * heads,)](
        q, k, v, g, some, lse, delta, dk, dv, *sizes, *strides, **shared,
        M=by_key.queries, N=by_key.keys,
        num_warps=by_key.num_warps, num_stages=by_key.num_stages,
    )  # fmt: skip
    return dq, dk, dv
