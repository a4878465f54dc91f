"""The verbs of YOSO's backward on an NVIDIA GPU, and what they are launched with."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention import nvrtc
from longspan.attention.random import Seed
from longspan.attention.yoso.verbs import (
    CUDA,
    INDICES,
    MOST_ROWS,
    Lists,
    collide,
    heavy_sum,
    is_sparse,
    lanes,
    launch_walk,
    seed_arguments,
)

ROWS, OUTER = (CUDA / f"{name}.cu" for name in ("rows", "outer"))
MANY_RUNS = 1 << 13  # of outer.cu: a dozen for each place that an H200 has for them
FEW_ROWS = 48, 64  # of a bucket, that outer.cu takes in pairs: of small buckets, and of others
FLOAT16_ROOM = 1 << 15  # that sums in float16 may reach


class Scales(NamedTuple):
    """Norms that `surrogate` takes out of rows and gives back, all float32."""

    g: Tensor  # (B, H, Nq)
    v: Tensor  # (B, H, Nk), zero for masked keys
    totals: Tensor  # (2, B, H): sums of the two over their tokens


def measure(
    g: Tensor,
    unit: tuple[Tensor, Tensor] | None,
    v: Tensor,
    key_mask: Tensor | None,
    channels: int,
) -> tuple[Tensor, Scales, tuple[Tensor, Tensor]]:
    """g taken through unit vectors and their 1/norms, if given; its norms, and those of v.

    Also rows for `surrogate`, with queries and keys of so many channels: the first half of each.
    """
    (batch, heads, queries, width), keys = g.shape, v.shape[2]
    new = functools.partial(torch.empty, dtype=torch.float32, device=g.device)
    scales = Scales(new(batch, heads, queries), new(batch, heads, keys), new(2, batch, heads))
    columns = _columns(channels, width)
    q_rows, k_rows = (
        torch.empty(batch, heads, n, 2 * columns, dtype=torch.float16, device=g.device)
        for n in (queries, keys)
    )
    y, inverse = unit or (None, None)
    out = g if unit is None else torch.empty_like(g)
    launch, groups = _launch_rows(channels, width), batch * heads
    launch(
        "measure", _row_blocks(g, v, columns), 256, g, y, inverse, out, v, key_mask,
        scales.g, scales.v, q_rows, k_rows, groups, heads, queries, keys,
    )  # fmt: skip
    launch("total", 2 * groups, 1024, *scales, groups, queries, keys)
    return out, scales, (q_rows, k_rows)


def surrogate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    key_mask: Tensor | None,
    scales: Scales,
    rows: tuple[Tensor, Tensor],
    q_token: Tensor,
    k_token: Tensor,
    q_lists: Lists,
    k_lists: Lists,
    bits: int,
    scale: float,
    used: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ_i = scale Σ_h Σ_j [same bucket] (g_i·v_j) k̂_j through the norm of q_i, dK likewise; dV.

    Contiguous rows (B, H, N, D) of bfloat16, up to 128 channels; dQ and dK take the first `used`
    hashes. `q_token` may be empty unless `is_sparse`. The kernels add in float16, in no fixed
    order; rows are scaled so that no sum leaves its range.
    """
    channels, width = q.shape[3], v.shape[3]
    if channels % 8:  # rows of whole 16-byte words
        q, k = (F.pad(x, (0, -channels % 8)) for x in (q, k))
    (batch, heads, queries, padded), keys, hashes = q.shape, k.shape[2], k_token.shape[3]
    sparse = is_sparse(max(queries, keys), bits)
    if not sparse:
        dv, _ = collide(q_lists, g, k_token, key_mask, bits, normalize=False)
    (q_order, q_first, q_most), (k_order, k_first, k_most) = q_lists, k_lists
    if q_order.dtype != k_order.dtype:
        q_order, k_order = q_order.to(torch.uint32), k_order.to(torch.uint32)
    columns, room = _columns(padded, width), FLOAT16_ROOM / used
    q_sums, k_sums = (
        torch.empty(batch, heads, n, columns, dtype=torch.float16, device=q.device)
        for n in (queries, keys)
    )
    launch, blocks = _launch_rows(padded, width), _row_blocks(q, k, columns)
    sizes = batch * heads, queries, keys
    launch("pair_rows", blocks, 256, q, k, *scales, *rows, q_sums, k_sums, *sizes, room)
    # A warp walks a run of buckets: not too many tokens, so that all parts of the GPU end together.
    lists, run, each, most = batch * heads * used, 32, 1, max(queries, keys)
    while run > 2 and (most * run > 1024 << bits or lists << bits < run * MANY_RUNS):
        run //= 2
    runs = lists * -(-(1 << bits) // run)
    few = FEW_ROWS[most >= 32 << bits]
    outer = _outer(columns, q_order.dtype, few)
    arguments = (
        *rows, q_order, k_order, q_first, k_first, q_sums, k_sums,
        queries, keys, hashes, used, 1 << bits, run,
    )  # fmt: skip
    in_pairs = columns == 64 and not sparse and most < 4 * few << bits
    light = (few, few) if in_pairs else (0, 0)
    if sparse:
        light, each = (MOST_ROWS, 1 << 30), 16
    elif in_pairs and most <= few // 2 << bits:
        each = 4
    # Where little or nothing is left to tables, a warp looks through many buckets.
    tables = 2 * lists * -(-(1 << bits) // (run * each))
    large = each, q_most, k_most, *light
    if in_pairs and most <= few << bits:
        outer("outer_both", tables + runs, 32, *arguments, *large, tables)
    else:
        if in_pairs:
            outer("outer_pairs", runs, 32, *arguments)
        outer("outer_tables", tables, 32 if columns == 64 else 128, *arguments, *large)
    fits = padded == columns
    dq, dk = (
        s.view(x.dtype) if fits else torch.empty_like(x) for s, x in ((q_sums, q), (k_sums, k))
    )
    scale /= room
    if sparse:
        dv, heavy = torch.empty_like(v), heavy_sum(q_lists, g, bits)
        each = 128 // (columns // 8)
        blocks = -(-batch * heads * queries // each) + -(-batch * heads * keys // each)
        launch_walk(padded, v, bits, q_order)(
            "walk_outer", blocks, 128, q_token, k_token, q_order, k_order, q_first,
            k_first, q, k, *rows, *scales, q_sums, k_sums, heavy, key_mask, dq, dk, dv,
            batch * heads, heads, hashes, used, queries, keys, scale,
        )  # fmt: skip
    else:
        launch("finish", blocks, 256, q_sums, k_sums, q, k, *scales, dq, dk, *sizes, scale)
    return dq[..., :channels].contiguous(), dk[..., :channels].contiguous(), dv


def true_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    key_mask: Tensor | None,
    q_hash: Tensor,
    k_token: Tensor,
    q_lists: Lists,
    k_lists: Lists,
    bits: int,
    scale: float,
    used: int,
    seed: Seed,
) -> tuple[Tensor, Tensor]:
    """dQ and dK weighted by the slope of the collision probability: contiguous rows, any dtype.

    Of a bucket of more than MOST_ROWS tokens, that many are drawn for each token that meets it, and
    stand for all: right on average, and linear whatever the sizes.
    """
    from longspan.attention.yoso import triton

    channels = q.shape[3]
    if channels % 8:
        q, k = (F.pad(x, (0, -channels % 8)) for x in (q, k))
    (batch, heads, queries, padded), keys, width = q.shape, k.shape[2], v.shape[3]
    (q_order, q_first, _), (k_order, k_first, _) = q_lists, k_lists
    if q_order.dtype != k_order.dtype:
        q_order, k_order = q_order.to(torch.uint32), k_order.to(torch.uint32)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    each = 128 // lanes(max(padded, width))
    blocks = -(-batch * heads * queries // each) + -(-batch * heads * keys // each)
    launch_walk(padded, v, bits, q_order)(
        "walk_true", blocks, 128, q_hash.mT.contiguous(), k_token, q_order, k_order, q_first,
        k_first, q, k, v, g, triton.norms(q), triton.norms(k, key_mask), key_mask, dq, dk,
        batch * heads, heads, k_token.shape[3], used, queries, keys, *seed_arguments(seed), scale,
    )  # fmt: skip
    return dq[..., :channels].contiguous(), dk[..., :channels].contiguous()


def _columns(channels: int, width: int) -> int:
    return 64 if max(channels, width) <= 64 else 128


def _row_blocks(a: Tensor, b: Tensor, columns: int) -> int:
    """Blocks of rows.cu for the rows of a and b."""
    rows = a.shape[0] * a.shape[1] * (a.shape[2] + b.shape[2])
    return -(-rows * columns // 8 // 256)


@functools.cache
def _launch_rows(channels: int, width: int) -> Callable[..., None]:
    return nvrtc.launcher(ROWS, D=channels, E=width, W=_columns(channels, width))


@functools.cache
def _outer(columns: int, index: torch.dtype, light: int) -> Callable[..., None]:
    return nvrtc.launcher(OUTER, W=columns, INDEX=INDICES[index], LIGHT=light)
