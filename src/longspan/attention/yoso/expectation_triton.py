"""The exact expectation of YOSO in Triton: Σ_j p_ij^τ v_j and its gradients, tile by tile.

No matrix of pairs is kept, and none needs a running maximum: p is at most 1. With x the cosine
and u = √((1 − x)/2), p = (2/π) arccos(u), whose square is analytic on 0 ≤ u ≤ 1: one square root
and a short polynomial give p², multiplications p^τ. Rows that a program owns are taken as given,
those it meets as unit vectors in their own dtype.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.attention.tiles import (
    INTERPRETED,
    Kernel,
    cdiv,
    inverse_length,
    load_rows,
    padded,
    store_rows,
    through_unit,
)


@dataclass(frozen=True)
class Config:
    """Queries and keys of a tile, and how Triton runs it."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By pass, bytes of an element and padded channels: tiles that fit registers and shared memory.
CONFIGS: dict[tuple[str, int, int], Config] = {
    ("forward", 2, 64): Config(128, 64, 8, 3),
    ("forward", 2, 128): Config(128, 64, 8, 2),
    ("forward", 2, 256): Config(64, 64, 4, 2),
    ("forward", 4, 64): Config(32, 32, 4, 1),
    ("forward", 4, 128): Config(16, 32, 4, 1),
    ("forward", 4, 256): Config(16, 16, 4, 1),
    ("queries", 2, 64): Config(64, 64, 4, 3),
    ("queries", 2, 128): Config(64, 64, 4, 2),
    ("queries", 2, 256): Config(64, 32, 8, 1),
    ("queries", 4, 64): Config(32, 32, 4, 1),
    ("queries", 4, 128): Config(16, 32, 4, 1),
    ("queries", 4, 256): Config(16, 16, 4, 1),
    ("keys", 2, 64): Config(128, 64, 4, 2),
    ("keys", 2, 128): Config(32, 128, 8, 2),
    ("keys", 2, 256): Config(32, 64, 8, 1),
    ("keys", 4, 64): Config(32, 32, 4, 1),
    ("keys", 4, 128): Config(16, 32, 4, 1),
    ("keys", 4, 256): Config(16, 16, 4, 1),
}


def choose(verb: str, dtype: torch.dtype, *channels: int) -> Config:
    """The configuration of a pass for rows of a dtype and width."""
    rows = dtype.itemsize, max(64, *(padded(n) for n in channels))
    return CONFIGS[verb, *rows]


@triton.jit
def _square_root(x, FTZ: tl.constexpr):
    """√|x| in one instruction; tiny numbers count as zero."""
    if FTZ:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 size; abs.f32 size, $1; sqrt.approx.ftz.f32 $0, size; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.sqrt(tl.abs(x))


@triton.jit
def _probability(half, BITS: tl.constexpr, DEGREE: tl.constexpr, LIFT: tl.constexpr,
                 TRUE: tl.constexpr, FTZ: tl.constexpr):  # fmt: skip
    """(LIFT · p²)^(τ/2) from half the cosine, and what the gradient multiplies it by, over τ.

    The polynomials fit p²/(1 − u) with the least relative error: 1.2e-4, 2.1e-6 and 7e-9.
    """
    v = 0.5 - half
    u = _square_root(v, FTZ)  # rounding takes cosines past 1
    if DEGREE == 3:
        r = ((-0.0282089912 * u + 0.107884368) * u - 0.26908355) * u + 0.999881974
    elif DEGREE == 5:
        r = (-0.0069442918 * u + 0.030833726) * u - 0.0702639667
        r = ((r * u + 0.13002634) * u - 0.273081952) * u + 0.999997962
    else:
        r = (0.00118675481 * u - 0.00681362577) * u + 0.0186626802
        r = ((r * u - 0.0345311776) * u + 0.0531320396) * u - 0.079845332
        r = ((r * u + 0.13201668) * u - 0.273238539) * u + 0.999999994
    square = r - r * u
    if TRUE or BITS % 2 == 1:
        square = tl.maximum(square, 0.0)  # past −1, too: its root must not be NaN
    weight = 1.0
    if TRUE:
        # 1/(π p sin), with the floors of the reference's slope.
        sine = tl.sqrt(tl.maximum(4 * v * (1 - v), 4.76837158e-7))
        weight = 0.318309886 / (sine * tl.maximum(tl.sqrt(square), 4.76837158e-7))
    if LIFT != 1:
        square *= LIFT
    power = 1.0
    if BITS % 2 == 1:
        power = tl.sqrt(square)
    if BITS // 2 % 2 == 1:
        power = power * square
    if BITS >= 4:
        square *= square
        if BITS // 4 % 2 == 1:
            power = power * square
    if BITS >= 8:
        square *= square
        if BITS // 8 % 2 == 1:
            power = power * square
    if BITS >= 16:
        power = square * square
    return power, weight


@Kernel
def _unit_rows(
    x, out, rows, tokens, heads, stride_b, stride_h, stride_n,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    bh = row // tokens
    at = bh // heads * stride_b + bh % heads * stride_h + row % tokens * stride_n
    value = load_rows(x, at, 1, row < rows, D, DP)
    unit = value.to(tl.float32) * inverse_length(value)[:, None]
    store_rows(out, row, D, row < rows, unit, D, DP)


def unit_rows(x: Tensor) -> Tensor:
    """Unit vectors of the rows of x (B, H, N, D), dense; zero rows stay zero."""
    batch, heads, tokens, channels = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, size = batch * heads * tokens, max(16, 4096 // padded(channels))
    _unit_rows[(cdiv(rows, size),)](
        x, out, rows, tokens, heads, *x.stride()[:3],
        D=channels, DP=padded(channels), ROWS=size, num_warps=4,
    )  # fmt: skip
    return out


@Kernel
def _sum_values(
    q, k, v, y, y_inverse, heads, queries, keys, q_b, q_h, q_n, v_b, v_h, v_n,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BITS: tl.constexpr, DEGREE: tl.constexpr, LIFT: tl.constexpr, SHRINK: tl.constexpr,
    NORMALIZE: tl.constexpr, FTZ: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M rows of the output: Σ_j p_ij^τ v_j, scaled to length one."""
    blocks = tl.cdiv(queries, M)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * M
    m, n = tl.arange(0, M), tl.arange(0, N)
    q += bh // heads * q_b + bh % heads * q_h + first.to(tl.int64) * q_n
    k += bh * keys * D
    v += bh // heads * v_b + bh % heads * v_h
    there = first + m < queries
    row = bh * queries + first + m
    query = load_rows(q, m, q_n, there, D, DP)
    half = 0.5 * inverse_length(query)[:, None]
    total = tl.zeros((M, EP), tl.float32)
    for start in range(0, keys, N):
        seen = start + n < keys
        key = load_rows(k, n, D, seen, D, DP)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        p, _ = _probability(score * half, BITS, DEGREE, LIFT, False, FTZ)
        # A key that is not there has a value of zero.
        value = load_rows(v, n, v_n, seen, E, EP)
        total = tl.dot(p.to(value.dtype), value, total, input_precision=PRECISION)
        k += N * D
        v += N * v_n
    if NORMALIZE:
        shrink = inverse_length(total)
        total *= shrink[:, None]
        tl.store(y_inverse + row, shrink / SHRINK, mask=there)
    else:
        total *= SHRINK
    store_rows(y, row, E, there, total, E, EP)


def sum_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hash_bits: int,
    normalize: bool,
    precision: str,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (B, H, Nq, Dv) for unit vectors k, and 1/norm (B, H, Nq) of its rows as summed."""
    batch, heads, queries, channels = q.shape
    keys, width = v.shape[2:]
    config = config or choose("forward", v.dtype, channels, width)
    y = v.new_empty(batch, heads, queries, width)
    y_inverse = v.new_empty((batch, heads, queries), dtype=torch.float32)
    # float16 has not the range for p^τ: lifted by 2^(τ − 1), a right angle counts 1/2.
    lift = hash_bits - 1 if v.dtype == torch.float16 else 0
    _sum_values[(cdiv(queries, config.queries) * batch * heads,)](
        q, k, v, y, y_inverse, heads, queries, keys, *q.stride()[:3], *v.stride()[:3],
        D=channels, DP=padded(channels), E=width, EP=padded(width), BITS=hash_bits,
        DEGREE=_degree(v.dtype), LIFT=2.0 ** (2 * lift / hash_bits), SHRINK=2.0**-lift,
        NORMALIZE=normalize, FTZ=not INTERPRETED, PRECISION=precision,
        M=config.queries, N=config.keys, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return y, y_inverse


@Kernel
def _query_gradients(
    q, k, v, g, y, y_inverse, inner, dq, heads, queries, keys,
    q_b, q_h, q_n, v_b, v_h, v_n,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BITS: tl.constexpr, DEGREE: tl.constexpr, TRUE: tl.constexpr, NORMALIZE: tl.constexpr,
    FTZ: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """M rows of dQ, and of the gradient inside the output's norm, for the keys' pass."""
    blocks = tl.cdiv(queries, M)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * M
    m, n = tl.arange(0, M), tl.arange(0, N)
    q += bh // heads * q_b + bh % heads * q_h + first.to(tl.int64) * q_n
    k += bh * keys * D
    v += bh // heads * v_b + bh % heads * v_h
    there = first + m < queries
    row = bh * queries + first + m
    query = load_rows(q, m, q_n, there, D, DP)
    length = inverse_length(query)
    half = 0.5 * length[:, None]
    grad = load_rows(g, row, E, there, E, EP)
    if NORMALIZE:
        outer = grad.to(tl.float32)
        unit = load_rows(y, row, E, there, E, EP).to(tl.float32)
        inverse = tl.load(y_inverse + row, mask=there, other=0)
        outer = (outer - tl.sum(outer * unit, axis=1)[:, None] * unit) * inverse[:, None]
        store_rows(inner, row, E, there, outer, E, EP)
        # Read again, it goes to shared memory once; from registers, each product would wait for the
        # one before.
        tl.debug_barrier()
        grad = load_rows(inner, row, E, there, E, EP)
    total = tl.zeros((M, DP), tl.float32)
    for start in range(0, keys, N):
        seen = start + n < keys
        key = load_rows(k, n, D, seen, D, DP)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        value = load_rows(v, n, v_n, seen, E, EP)
        inside = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        p, weight = _probability(score * half, BITS, DEGREE, 1, TRUE, FTZ)
        w = p * inside * weight
        total = tl.dot(w.to(key.dtype), key, total, input_precision=PRECISION)
        k += N * D
        v += N * v_n
    total *= BITS if TRUE else BITS / 2
    store_rows(dq, row, D, there, through_unit(total, query, length), D, DP)


@Kernel
def _key_gradients(
    q, k, v, inner, dk, dv, heads, queries, keys, k_b, k_h, k_n, v_b, v_h, v_n,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    BITS: tl.constexpr, DEGREE: tl.constexpr, TRUE: tl.constexpr,
    FTZ: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """N rows of dK and dV: tiles are transposed, so that products take them from registers."""
    blocks = tl.cdiv(keys, N)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * N
    m, n = tl.arange(0, M), tl.arange(0, N)
    q += bh * queries * D
    k += bh // heads * k_b + bh % heads * k_h + first.to(tl.int64) * k_n
    v += bh // heads * v_b + bh % heads * v_h + first.to(tl.int64) * v_n
    inner += bh * queries * E
    there = first + n < keys
    row = bh * keys + first + n
    key = load_rows(k, n, k_n, there, D, DP)
    length = inverse_length(key)
    half = 0.5 * length[:, None]
    value = load_rows(v, n, v_n, there, E, EP)
    to_key = tl.zeros((N, DP), tl.float32)
    to_value = tl.zeros((N, EP), tl.float32)
    for start in range(0, queries, M):
        seen = start + m < queries
        query = load_rows(q, m, D, seen, D, DP)
        grad = load_rows(inner, m, E, seen, E, EP)
        score = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        inside = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
        p, weight = _probability(score * half, BITS, DEGREE, 1, TRUE, FTZ)
        to_value = tl.dot(p.to(grad.dtype), grad, to_value, input_precision=PRECISION)
        w = p * inside * weight
        to_key = tl.dot(w.to(query.dtype), query, to_key, input_precision=PRECISION)
        q += M * D
        inner += M * E
    to_key *= BITS if TRUE else BITS / 2
    store_rows(dk, row, D, there, through_unit(to_key, key, length), D, DP)
    store_rows(dv, row, E, there, to_value, E, EP)


def gradients(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, y_inverse: Tensor, hash_bits: int,
    true: bool, normalize: bool, precision: str, configs: tuple[Config, Config] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV for tensors of one dtype, bfloat16 or float32; g and y are contiguous."""
    batch, heads, queries, channels = q.shape
    keys, width = v.shape[2:]
    by_query, by_key = configs or (
        choose(verb, v.dtype, channels, width) for verb in ("queries", "keys")
    )
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    inner = torch.empty_like(g) if normalize else g
    shared = dict(
        D=channels, DP=padded(channels), E=width, EP=padded(width), BITS=hash_bits,
        DEGREE=_degree(v.dtype), TRUE=true, FTZ=not INTERPRETED, PRECISION=precision,
    )  # fmt: skip
    _query_gradients[(cdiv(queries, by_query.queries) * batch * heads,)](
        q, unit_rows(k), v, g, y, y_inverse, inner, dq, heads, queries, keys,
        *q.stride()[:3], *v.stride()[:3], **shared, NORMALIZE=normalize,
        M=by_query.queries, N=by_query.keys,
        num_warps=by_query.num_warps, num_stages=by_query.num_stages,
    )  # fmt: skip
    _key_gradients[(cdiv(keys, by_key.keys) * batch * heads,)](
        unit_rows(q), k, v, inner, dk, dv, heads, queries, keys,
        *k.stride()[:3], *v.stride()[:3], **shared, M=by_key.queries, N=by_key.keys,
        num_warps=by_key.num_warps, num_stages=by_key.num_stages,
    )  # fmt: skip
    return dq, dk, dv


def _degree(dtype: torch.dtype) -> int:
    """Of the polynomial whose error stays under the rounding of a dtype."""
    return {torch.bfloat16: 3, torch.float16: 5, torch.float32: 8}[dtype]
