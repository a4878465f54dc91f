"""Softmax attention between many rows and few, in Triton: the cross-attention of linear methods.

    many  a (B, H, N, D), b (B, H, N, E), any strides    few  c (B, H, F, D), e (B, H, F, E), dense

All are of one dtype: what a kernel rounds itself goes through registers, and its products wait for
each other.
`read_few`: each of many queries a reads few keys c and values e. `read_many`: each of few queries c
reads many keys a and values b, a run of them at a time, and the runs are merged. The gradients of
either (few_backward.py) have a pass that owns rows of the many and one that owns rows of the few;
the latter sums over runs of the many, whose parts are added up in one order. Scores are in units
of log₂ e.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from longspan.attention.tiles import LOG2E, Kernel, arithmetic, cdiv, load_rows, padded, store_rows

PROGRAMS = 264  # two for each multiprocessor of a large GPU: as many runs as keep it busy


@dataclass(frozen=True)
class Config:
    """Rows of a tile among the many and, at most, among the few, and how Triton runs it."""

    many: int
    few: int
    num_warps: int
    num_stages: int


# By verb, bytes of an element and padded channels: tiles that fit registers and shared memory.
CONFIGS: dict[tuple[str, int, int], Config] = {
    ("read_few", 2, 64): Config(64, 64, 4, 3),
    ("read_few", 2, 128): Config(64, 64, 4, 2),
    ("read_few", 2, 256): Config(64, 64, 8, 1),
    ("read_few", 4, 64): Config(32, 32, 4, 1),
    ("read_few", 4, 128): Config(16, 32, 4, 1),
    ("read_few", 4, 256): Config(16, 16, 4, 1),
    ("read_many", 2, 64): Config(64, 64, 4, 3),
    ("read_many", 2, 128): Config(64, 64, 4, 2),
    ("read_many", 2, 256): Config(64, 64, 8, 1),
    ("read_many", 4, 64): Config(32, 32, 4, 1),
    ("read_many", 4, 128): Config(32, 16, 4, 1),
    ("read_many", 4, 256): Config(16, 16, 4, 1),
    ("many_gradients", 2, 64): Config(128, 64, 8, 2),
    ("many_gradients", 2, 128): Config(64, 64, 8, 1),
    ("many_gradients", 2, 256): Config(64, 32, 8, 1),
    ("many_gradients", 4, 64): Config(32, 32, 4, 1),
    ("many_gradients", 4, 128): Config(16, 32, 4, 1),
    ("many_gradients", 4, 256): Config(16, 16, 4, 1),
    ("few_gradients", 2, 64): Config(64, 128, 8, 2),
    ("few_gradients", 2, 128): Config(32, 64, 8, 2),
    ("few_gradients", 2, 256): Config(32, 64, 8, 1),
    ("few_gradients", 4, 64): Config(32, 32, 4, 1),
    ("few_gradients", 4, 128): Config(32, 16, 4, 1),
    ("few_gradients", 4, 256): Config(16, 16, 4, 1),
}


def choose(verb: str, dtype: torch.dtype, *channels: int) -> Config:
    """The configuration of a verb for rows of a dtype and width."""
    return CONFIGS[verb, dtype.itemsize, max(64, *(padded(n) for n in channels))]


@Kernel
def _read_few(
    a, c, e, there, y, lse, heads, many, few, scale, a_b, a_h, a_n,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, F: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """M queries read all of the few keys; EVEN if they fill all tiles."""
    blocks = tl.cdiv(many, M)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * M
    m, f = tl.arange(0, M), tl.arange(0, F)
    a += bh // heads * a_b + bh % heads * a_h + first.to(tl.int64) * a_n
    c += bh * few * D
    e += bh * few * E
    query = load_rows(a, m, a_n, first + m < many, D, DP)
    top = tl.full((M,), -float("inf"), tl.float32)
    mass = tl.zeros((M,), tl.float32)
    total = tl.zeros((M, EP), tl.float32)
    for tile in range(TILES):
        j = tile * F + f
        key = load_rows(c, j, D, j < few, D, DP)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if MASKED or not EVEN:
            seen = j < few
            if MASKED:
                seen &= tl.load(there + bh // heads * few + j, mask=seen, other=0) != 0
            score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(top - safe)
        mass = mass * shrink + tl.sum(p, axis=1)
        value = load_rows(e, j, E, j < few, E, EP)
        total = tl.dot(p.to(query.dtype), value, total * shrink[:, None], input_precision=PRECISION)
        top = higher
    row = bh * many + first + m
    blind = mass == 0
    total = total / tl.where(blind, 1.0, mass)[:, None]
    store_rows(y, row, E, first + m < many, total, E, EP)
    # Of a query that sees nothing, +∞: its weights are 2^−∞ in the backward.
    safe = tl.where(blind, float("inf"), top + tl.log2(tl.where(blind, 1.0, mass)))
    tl.store(lse + row, safe, mask=first + m < many)


def read_few(
    a: Tensor, c: Tensor, e: Tensor, there: Tensor | None, scale: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale · a cᵀ) e over the keys that are `there` (B, F); its log₂-sum-exp (B, H, N)."""
    batch, heads, many, channels = a.shape
    few, width = e.shape[2:]
    config = config or choose("read_few", a.dtype, channels, width)
    y = a.new_empty(batch, heads, many, width)
    lse = a.new_empty((batch, heads, many), dtype=torch.float32)
    size = min(config.few, padded(few))
    _read_few[(cdiv(many, config.many) * batch * heads,)](
        a, c, e, a if there is None else there, y, lse, heads, many, few, scale * LOG2E,
        *a.stride()[:3], D=channels, DP=padded(channels), E=width, EP=padded(width),
        MASKED=there is not None, EVEN=few % size == 0, PRECISION=arithmetic(a.dtype),
        M=config.many, F=size, TILES=cdiv(few, size),
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return y, lse


@Kernel
def _read_many(
    a, b, c, mask, y, lse, groups, heads, many, few, run, scale, a_b, a_h, a_n, b_b, b_h, b_n,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """F of the few queries read a run of the many keys."""
    tiles, runs = tl.cdiv(few, F), tl.cdiv(many, run)
    pid = tl.program_id(0)
    bh = (pid // (tiles * runs)).to(tl.int64)
    tile, part = pid // runs % tiles, pid % runs
    begin = part * run
    end = tl.minimum(begin + run, many)
    m, f = tl.arange(0, M), tile * F + tl.arange(0, F)
    a += bh // heads * a_b + bh % heads * a_h + begin.to(tl.int64) * a_n
    b += bh // heads * b_b + bh % heads * b_h + begin.to(tl.int64) * b_n
    mask += bh // heads * many
    query = load_rows(c + bh * few * D, f, D, f < few, D, DP)
    top = tl.full((F,), -float("inf"), tl.float32)
    mass = tl.zeros((F,), tl.float32)
    total = tl.zeros((F, EP), tl.float32)
    for start in range(begin, end, M):
        seen = start + m < end
        if MASKED:
            seen &= tl.load(mask + start + m, mask=seen, other=0) != 0
        key = load_rows(a, m, a_n, seen, D, DP)
        score = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        score = tl.where(seen[None, :], score, -float("inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(score - safe[:, None])
        shrink = tl.exp2(top - safe)
        mass = mass * shrink + tl.sum(p, axis=1)
        value = load_rows(b, m, b_n, seen, E, EP)
        total = tl.dot(p.to(value.dtype), value, total * shrink[:, None], input_precision=PRECISION)
        top = higher
        a += M * a_n
        b += M * b_n
    row = (part.to(tl.int64) * groups + bh) * few + f
    blind = mass == 0
    store_rows(y, row, E, f < few, total / tl.where(blind, 1.0, mass)[:, None], E, EP)
    tl.store(lse + row, top + tl.log2(tl.where(blind, 1.0, mass)), mask=f < few)


@Kernel
def _merge(
    y, lse, y_out, lse_out, rows, runs,
    E: tl.constexpr, EP: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Join the softmaxes over runs into the softmax over their union."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    there = row < rows
    top = tl.full((R,), -float("inf"), tl.float32)
    at = row
    for _ in range(runs):
        top = tl.maximum(top, tl.load(lse + at, mask=there, other=0))
        at += rows
    safe = tl.where(top == -float("inf"), 0.0, top)
    mass = tl.zeros((R,), tl.float32)
    total = tl.zeros((R, EP), tl.float32)
    at = row
    for _ in range(runs):
        weight = tl.exp2(tl.load(lse + at, mask=there, other=0) - safe)
        mass += weight
        total += load_rows(y, at, E, there, E, EP) * weight[:, None]
        at += rows
    blind = mass == 0
    total = total / tl.where(blind, 1.0, mass)[:, None]
    store_rows(y_out, row, E, there, total, E, EP)
    safe = tl.where(blind, float("inf"), top + tl.log2(tl.where(blind, 1.0, mass)))
    tl.store(lse_out + row, safe, mask=there)


def read_many(
    a: Tensor, b: Tensor, c: Tensor, mask: Tensor | None, scale: float,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale · c aᵀ) b over the keys a (B, N) mask shows, in float32; its log₂-sum-exp."""
    batch, heads, many, channels = a.shape
    few, width = c.shape[2], b.shape[3]
    config = config or choose("read_many", a.dtype, channels, width)
    size = min(config.few, padded(few))
    tiles = cdiv(few, size)
    run = _run(many, batch * heads * tiles, config.many)
    runs = cdiv(many, run)
    y = a.new_empty((runs, batch, heads, few, width), dtype=torch.float32)
    lse = a.new_empty((runs, batch, heads, few), dtype=torch.float32)
    _read_many[(batch * heads * tiles * runs,)](
        a, b, c, a if mask is None else mask, y, lse, batch * heads, heads, many, few, run,
        scale * LOG2E, *a.stride()[:3], *b.stride()[:3],
        D=channels, DP=padded(channels), E=width, EP=padded(width), MASKED=mask is not None,
        PRECISION=arithmetic(a.dtype), M=config.many, F=size,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    y_out, lse_out = torch.empty_like(y[0]), torch.empty_like(lse[0])
    _merge[(cdiv(lse_out.numel(), 16),)](
        y, lse, y_out, lse_out, lse_out.numel(), runs, E=width, EP=padded(width), R=16, num_warps=4
    )
    return y_out, lse_out


def _run(many: int, others: int, step: int) -> int:
    """Rows of a run, whole tiles, so that there are enough programs and no run is tiny."""
    runs = max(1, min(PROGRAMS // max(1, others), cdiv(many, 4 * step)))
    return step * cdiv(cdiv(many, runs), step)
