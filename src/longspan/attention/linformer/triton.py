"""The verbs of Linformer that are its own, in Triton: products along the sequence.

    project  (E x)      k × D a head, a sum over tokens, by runs of them whose parts are added up
    spread   (Eᵀ y)     N × D a head, a sum over k
    outer    (Σ y xᵀ)   k × N, a sum over the batch and the heads that share a projection

Projections are (k, N), or (H, k, N), with rows of any stride.
"""

from dataclasses import dataclass

import torch
import triton
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


@dataclass(frozen=True)
class Config:
    """Projected rows and tokens of a tile, and how Triton runs it."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


# By verb, bytes of an element and padded channels.
CONFIGS: dict[tuple[str, int, int], Config] = {
    ("project", 2, 64): Config(64, 64, 4, 3),
    ("project", 2, 128): Config(128, 64, 8, 3),
    ("project", 2, 256): Config(64, 64, 8, 2),
    ("project", 4, 64): Config(32, 32, 4, 1),
    ("project", 4, 128): Config(32, 16, 4, 1),
    ("project", 4, 256): Config(16, 16, 4, 1),
    ("spread", 2, 64): Config(64, 128, 4, 3),
    ("spread", 2, 128): Config(64, 128, 8, 3),
    ("spread", 2, 256): Config(64, 64, 8, 2),
    ("spread", 4, 64): Config(32, 32, 4, 1),
    ("spread", 4, 128): Config(16, 32, 4, 1),
    ("spread", 4, 256): Config(16, 16, 4, 1),
    ("outer", 2, 64): Config(128, 128, 8, 3),
    ("outer", 2, 128): Config(128, 128, 8, 2),
    ("outer", 2, 256): Config(64, 64, 8, 1),
    ("outer", 4, 64): Config(32, 32, 4, 1),
    ("outer", 4, 128): Config(32, 32, 4, 1),
    ("outer", 4, 256): Config(16, 16, 4, 1),
}


def choose(verb: str, x: Tensor) -> Config:
    """The configuration of a verb for rows as x has them."""
    return CONFIGS[verb, x.dtype.itemsize, max(64, padded(x.shape[3]))]


@triton.jit
def _columns(p, row, rows, token, tokens, stride):
    """A tile (R, T) of a projection."""
    there = (row < rows)[:, None] & (token < tokens)[None, :]
    return tl.load(p + row.to(tl.int64)[:, None] * stride + token[None, :], mask=there, other=0)


@Kernel
def _project(
    p, x, mask, out, groups, heads, rows, tokens, run, p_h, p_k, x_b, x_h, x_n,
    MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """What a run of tokens gives R projected rows of a head."""
    tiles, runs = tl.cdiv(rows, R), tl.cdiv(tokens, run)
    pid = tl.program_id(0)
    bh = (pid // (tiles * runs)).to(tl.int64)
    # Tiles of a run lie next to each other: they read the same tokens.
    part, tile = pid // tiles % runs, pid % tiles
    begin = part * run
    end = tl.minimum(begin + run, tokens)
    row, t = tile * R + tl.arange(0, R), tl.arange(0, T)
    p += bh % heads * p_h + begin
    x += bh // heads * x_b + bh % heads * x_h + begin.to(tl.int64) * x_n
    mask += bh // heads * tokens
    total = tl.zeros((R, DP), tl.float32)
    for start in range(begin, end, T):
        seen = start + t < end
        left = _columns(p, row, rows, t, end - start, p_k)
        if MASKED:
            seen &= tl.load(mask + start + t, mask=seen, other=0) != 0
        right = load_rows(x, t, x_n, seen, D, DP)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        p += T
        x += T * x_n
    at = (part.to(tl.int64) * groups + bh) * rows + row
    store_rows(out, at, D, row < rows, total, D, DP)


def project(p: Tensor, x: Tensor, mask: Tensor | None, config: Config | None = None) -> Tensor:
    """E x over the tokens that a (B, N) mask shows: (B, H, k, D) in the dtype of x."""
    batch, heads, tokens, channels = x.shape
    rows = p.shape[-2]
    config = config or choose("project", x)
    tiles = cdiv(rows, config.rows)
    runs = max(1, min(PROGRAMS // (batch * heads * tiles), tokens // (8 * config.tokens)))
    run = config.tokens * cdiv(cdiv(tokens, runs), config.tokens)
    runs = cdiv(tokens, run)
    dtype = x.dtype if runs == 1 else torch.float32
    out = x.new_empty((runs, batch, heads, rows, channels), dtype=dtype)
    _project[(batch * heads * tiles * runs,)](
        p, x, x if mask is None else mask, out, batch * heads, heads, rows, tokens, run,
        *_strides(p), *x.stride()[:3], MASKED=mask is not None, D=channels, DP=padded(channels),
        PRECISION=arithmetic(x.dtype), R=config.rows, T=config.tokens,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return add_parts(out, x.dtype)


@Kernel
def _spread(
    p, y, mask, out, heads, rows, tokens, p_h, p_k,
    MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PRECISION: tl.constexpr,
    R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """T tokens of a head; zeros for those a mask hides."""
    blocks = tl.cdiv(tokens, T)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * T
    t, r = first + tl.arange(0, T), tl.arange(0, R)
    p += bh % heads * p_h
    y += bh * rows * D
    total = tl.zeros((T, DP), tl.float32)
    for start in range(0, rows, R):
        row = start + r
        left = _columns(p, row, rows, t, tokens, p_k)
        right = load_rows(y, row, D, row < rows, D, DP)
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    if MASKED:
        seen = tl.load(mask + bh // heads * tokens + t, mask=t < tokens, other=0) != 0
        total = tl.where(seen[:, None], total, 0.0)
    store_rows(out, bh * tokens + t, D, t < tokens, total, D, DP)


def spread(p: Tensor, y: Tensor, mask: Tensor | None, config: Config | None = None) -> Tensor:
    """Eᵀ y, (B, H, N, D), for dense y (B, H, k, D); zeros where a (B, N) mask hides tokens."""
    batch, heads, rows, channels = y.shape
    tokens = p.shape[-1]
    config = config or choose("spread", y)
    out = y.new_empty(batch, heads, tokens, channels)
    _spread[(cdiv(tokens, config.tokens) * batch * heads,)](
        p, y, y if mask is None else mask, out, heads, rows, tokens, *_strides(p),
        MASKED=mask is not None, D=channels, DP=padded(channels), PRECISION=arithmetic(y.dtype),
        R=config.rows, T=config.tokens,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


@Kernel
def _outer(
    y, x, mask, out, heads, owners, members, rows, tokens, run, y_g, x_b, x_h, x_n,
    SHARED: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PRECISION: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of a projection, from a run of the heads that share it."""
    tiles, blocks = tl.cdiv(rows, R), tl.cdiv(tokens, T)
    pid = tl.program_id(0)
    tile, block = pid % tiles, pid // tiles % blocks
    owner, part = pid // (tiles * blocks) % owners, pid // (tiles * blocks * owners)
    row, n = tile * R + tl.arange(0, R), tl.arange(0, T)
    t = block * T + n
    x += block.to(tl.int64) * T * x_n
    total = tl.zeros((R, T), tl.float32)
    for member in range(part * run, tl.minimum(part * run + run, members)):
        # All heads of all samples, or one head of all samples.
        bh = tl.cast(member if SHARED else member * heads + owner, tl.int64)
        seen = t < tokens
        if MASKED:
            seen &= tl.load(mask + bh // heads * tokens + t, mask=seen, other=0) != 0
        left = load_rows(y + bh * y_g, row, D, row < rows, D, DP)
        right = load_rows(x + bh // heads * x_b + bh % heads * x_h, n, x_n, seen, D, DP)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    at = (part.to(tl.int64) * owners + owner) * rows + row
    there = (row < rows)[:, None] & (t < tokens)[None, :]
    tl.store(out + at[:, None] * tokens + t[None, :], total, mask=there)


def outer(
    y: Tensor, x: Tensor, mask: Tensor | None, shared: bool, dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Σ y xᵀ over the batch, and over the heads if they share it: (k, N) or (H, k, N), in dtype."""
    batch, heads, tokens, channels = x.shape
    rows = y.shape[2]
    config = config or choose("outer", x)
    owners, members = (1, batch * heads) if shared else (heads, batch)
    programs = cdiv(rows, config.rows) * cdiv(tokens, config.tokens) * owners
    runs = max(1, min(PROGRAMS // 2 // programs, cdiv(members, 4)))
    run = cdiv(members, runs)
    runs = cdiv(members, run)
    out = x.new_empty((runs, owners, rows, tokens), dtype=torch.float32)
    _outer[(programs * runs,)](
        y, x, x if mask is None else mask, out, heads, owners, members, rows, tokens, run,
        rows * channels, *x.stride()[:3], SHARED=shared, MASKED=mask is not None,
        D=channels, DP=padded(channels), PRECISION=arithmetic(x.dtype),
        R=config.rows, T=config.tokens,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    total = add_parts(out, dtype)
    return total[0] if shared else total


def _strides(p: Tensor) -> tuple[int, int]:
    """From head to head (none where they share) and from row to row."""
    return (p.stride(0) if p.dim() == 3 else 0), p.stride(-2)
