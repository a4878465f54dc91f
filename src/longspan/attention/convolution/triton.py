"""The residual convolution in Triton: a product of a band of weights and rows of values.

Row t of a tile is Σ_s band[t, s] · row s, where band[t, s] = weight[s − t] is not zero for K
diagonals: a few square matrix products, whatever the filter's length.
"""

import torch
import triton.language as tl
from torch import Tensor

from longspan.attention.tiles import (
    Kernel,
    add_parts,
    arithmetic,
    cdiv,
    load_rows,
    padded,
    store_rows,
)

PROGRAMS = 528  # four for each multiprocessor of a large GPU


def rows_of_a_tile(dtype: torch.dtype, channels: int) -> int:
    """So many that a tile fits the registers."""
    return 64 if dtype.itemsize == 2 and padded(channels) <= 128 else 32


@Kernel
def _convolve(
    x, y, weight, mask, out, heads, tokens, size, x_b, x_h, x_n, y_b, y_h, y_n,
    E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr, ADD: tl.constexpr,
    BACK: tl.constexpr, PRECISION: tl.constexpr, T: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """T rows; BACK turns the filter around and hides rows that come out, not those that go in."""
    blocks = tl.cdiv(tokens, T)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * T
    t = tl.arange(0, T)
    x += bh // heads * x_b + bh % heads * x_h
    weight += bh % heads * size
    mask += bh // heads * tokens
    there = first + t < tokens
    total = tl.zeros((T, EP), tl.float32)
    if ADD:
        y += bh // heads * y_b + bh % heads * y_h + first.to(tl.int64) * y_n
        total += load_rows(y, t, y_n, there, E, EP).to(tl.float32)
    for chunk in range(CHUNKS):
        s = chunk * T + t  # of the rows that the tile reaches
        row = first - size // 2 + s
        seen = (row >= 0) & (row < tokens)
        if MASKED and not BACK:
            seen &= tl.load(mask + row, mask=seen, other=0) != 0
        values = load_rows(x, row.to(tl.int64), x_n, seen, E, EP)
        tap = s[None, :] - t[:, None]
        inside = (tap >= 0) & (tap < size)
        if BACK:
            tap = size - 1 - tap
        band = tl.load(weight + tap, mask=inside, other=0).to(values.dtype)
        total = tl.dot(band, values, total, input_precision=PRECISION)
    if MASKED and BACK:
        shown = tl.load(mask + first + t, mask=there, other=0) != 0
        total = tl.where(shown[:, None], total, 0.0)
    store_rows(out, bh * tokens + first + t, E, there, total, E, EP)


def convolve(
    x: Tensor, weight: Tensor, mask: Tensor | None, y: Tensor | None = None, back: bool = False
) -> Tensor:
    """y, or nothing, and the convolution of x (B, H, N, E); `back` is its transpose."""
    batch, heads, tokens, width = x.shape
    size = weight.shape[2]
    out = torch.empty(x.shape, dtype=x.dtype if y is None else y.dtype, device=x.device)
    tile = rows_of_a_tile(x.dtype, width)
    given = x if y is None else y
    _convolve[(batch * heads * cdiv(tokens, tile),)](
        x, given, weight, x if mask is None else mask, out, heads, tokens, size,
        *x.stride()[:3], *given.stride()[:3],
        E=width, EP=padded(width), MASKED=mask is not None, ADD=y is not None, BACK=back,
        PRECISION=arithmetic(x.dtype), T=tile, CHUNKS=1 + cdiv(size - 1, tile), num_warps=4,
    )  # fmt: skip
    return out


@Kernel
def _weight_gradient(
    g, v, mask, parts, heads, tokens, size, run, g_b, g_h, g_n, v_b, v_h, v_n,
    E: tl.constexpr, EP: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Of T taps, over a run of rows.

    A gradient t and a value s of a tile meet at tap s − t: sums over diagonals of g vᵀ, which tiles
    add up. Taps from `low` on need the diagonals of two squares, upper ones of the first and lower
    ones of the second.
    """
    blocks, runs = tl.cdiv(size, T), tl.cdiv(tokens, run)
    low = tl.program_id(0) % blocks * T
    begin = tl.program_id(0) // blocks % runs * run
    bh = (tl.program_id(0) // blocks // runs).to(tl.int64)
    t = tl.arange(0, T)
    g += bh // heads * g_b + bh % heads * g_h
    v += bh // heads * v_b + bh % heads * v_h
    mask += bh // heads * tokens
    upper = tl.zeros((T, T), tl.float32)
    lower = tl.zeros((T, T), tl.float32)
    for start in range(begin, tl.minimum(begin + run, tokens), T):
        n = (start + t).to(tl.int64)
        gradient = load_rows(g, n, g_n, n < tokens, E, EP)
        row = n + low - size // 2
        seen = (row >= 0) & (row < tokens)
        if MASKED:
            seen &= tl.load(mask + row, mask=seen, other=0) != 0
        value = load_rows(v, row, v_n, seen, E, EP)
        upper = tl.dot(gradient, tl.trans(value), upper, input_precision=PRECISION)
        row += T
        seen = (row >= 0) & (row < tokens)
        if MASKED:
            seen &= tl.load(mask + row, mask=seen, other=0) != 0
        value = load_rows(v, row, v_n, seen, E, EP)
        lower = tl.dot(gradient, tl.trans(value), lower, input_precision=PRECISION)
    away = t[None, :] - t[:, None]
    both = tl.where(away >= 0, upper, lower)
    away = tl.where(away >= 0, away, away + T)
    place = tl.program_id(0) // blocks % runs * (tl.num_programs(0) // blocks // runs) + bh
    for tap in range(tl.minimum(T, size - low)):
        total = tl.sum(tl.sum(tl.where(away == tap, both, 0.0), axis=1), axis=0)
        tl.store(parts + place * size + low + tap, total)


def weight_gradient(g: Tensor, v: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
    """Of the weight (H, 1, K, 1), from the output's gradient and the values (B, H, N, E)."""
    batch, heads, tokens, width = v.shape
    size, tile = weight.shape[2], rows_of_a_tile(v.dtype, width)
    programs = batch * heads * cdiv(size, tile)
    run = cdiv(cdiv(tokens, cdiv(PROGRAMS, programs)), tile) * tile
    runs = cdiv(tokens, run)
    parts = torch.empty(runs * batch, heads, size, dtype=torch.float32, device=v.device)
    _weight_gradient[(programs * runs,)](
        g, v, v if mask is None else mask, parts, heads, tokens, size, run,
        *g.stride()[:3], *v.stride()[:3],
        E=width, EP=padded(width), MASKED=mask is not None, PRECISION=arithmetic(v.dtype), T=tile,
        num_warps=4,
    )  # fmt: skip
    return add_parts(parts, weight.dtype).view(weight.shape)
