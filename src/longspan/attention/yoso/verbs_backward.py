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
    TYPES,
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
RUN_TOKENS = 1024  # of a side of a run: not too many, so that all parts of the GPU end together
QUEUE_TOKENS = 256, 64  # likewise, of runs of pairs, from a queue, whose last ones are short
LATE = 8  # one head in so many has short runs
FEW_ROWS = 48, 64  # of a bucket, that outer.cu takes in pairs: of small buckets, and of others
PER_SM = 8  # as outer.cu has it: warps of a multiprocessor
ROW_PARTS = 2  # as rows.cu has it: rows that a group of lanes takes
FLOAT16_ROOM = 1 << 15  # that sums in float16 may reach
# Of each type of rows: what they are added up in over hashes, and what holds gradients over norms.
SUMS = {torch.bfloat16: torch.float16, torch.float16: torch.float32}
DIVIDED = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}


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

    Also rows for outer.cu, with queries and keys of so many channels: the first half of each.
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
    out = g if unit is None else torch.empty_like(g, dtype=DIVIDED[g.dtype])
    _launch_rows(channels, width, g.dtype)(
        "measure", _row_blocks(g, v, columns), 256, g, y, inverse, out, v, key_mask,
        scales.g, scales.v, q_rows, k_rows, batch * heads, heads, queries, keys,
    )  # fmt: skip
    return out, scales, (q_rows, k_rows)


def surrogate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    unit: tuple[Tensor, Tensor] | None,
    key_mask: Tensor | None,
    q_token: Tensor,
    k_token: Tensor,
    q_lists: Lists,
    k_lists: Lists,
    bits: int,
    scale: float,
    used: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ_i = scale Σ_h Σ_j [same bucket] (g_i·v_j) k̂_j through the norm of q_i, dK likewise; dV.

    Contiguous rows (B, H, N, D) of bfloat16 or float16, up to 128 channels; g is first taken
    through the unit vectors of the output and their 1/norms, if given; dQ and dK take the first
    `used` hashes. `q_token` may be empty unless `is_sparse`. The kernels add in no fixed order;
    rows are scaled so that nothing leaves the range of float16.
    """
    channels, width = q.shape[3], v.shape[3]
    if channels % 8:  # rows of whole 16-byte words
        q, k = (F.pad(x, (0, -channels % 8)) for x in (q, k))
    (batch, heads, queries, padded), keys, hashes = q.shape, k.shape[2], k_token.shape[3]
    sparse = is_sparse(max(queries, keys), bits)
    g, scales, rows = measure(g, unit, v, key_mask, padded)
    if sparse:
        dv, heavy = torch.empty_like(v), heavy_sum(q_lists, g, bits)
    else:
        dv, _ = collide(q_lists, g, k_token, key_mask, bits, v.dtype, normalize=False)
    del g  # its memory is needed
    if q_lists.order.dtype != k_lists.order.dtype:
        q_lists, k_lists = (x._replace(order=x.order.to(torch.uint32)) for x in (q_lists, k_lists))
    columns = _columns(padded, width)
    room = FLOAT16_ROOM / (used if SUMS[q.dtype] == torch.float16 else 1)
    q_sums, k_sums = (
        torch.empty(batch, heads, n, columns, dtype=SUMS[q.dtype], device=q.device)
        for n in (queries, keys)
    )
    launch, blocks = _launch_rows(padded, width, q.dtype), _row_blocks(q, k, columns)
    groups = batch * heads
    sizes = groups, queries, keys
    # Where buckets are nearly empty, few heads have one that is not walked.
    fullest = scales.totals.new_empty((2, batch, heads), dtype=torch.uint32) if sparse else None
    queue = q_lists.most.new_empty(1)
    launch(
        "total", 2 * groups, 1024, *scales, q_lists.most, k_lists.most, fullest, *sizes,
        hashes, used, queue,
    )  # fmt: skip
    launch(
        "pair_rows", blocks, 256, q, k, *scales, fullest, *rows, q_sums, k_sums, *sizes,
        MOST_ROWS, room,
    )  # fmt: skip
    outer(rows, q_lists, k_lists, (q_sums, k_sums), queue, bits, used, walked=sparse)
    fits = padded == columns and q_sums.itemsize == q.itemsize
    dq, dk = (
        s.view(x.dtype) if fits else torch.empty_like(x) for s, x in ((q_sums, q), (k_sums, k))
    )
    scale /= room
    if sparse:
        each = 128 // (columns // 8)
        blocks = -(-batch * heads * queries // each) + -(-batch * heads * keys // each)
        launch_walk(padded, v, bits, q_lists.order)(
            "walk_outer", blocks, 128, q_token, k_token, q_lists.order, k_lists.order,
            q_lists.first, k_lists.first, q, k, *rows, *scales, fullest, q_sums, k_sums, heavy,
            key_mask, dq, dk, dv, batch * heads, heads, hashes, used, queries, keys, scale,
        )  # fmt: skip
    else:
        launch("finish", blocks, 256, q_sums, k_sums, q, k, *scales, dq, dk, *sizes, scale)
    return dq[..., :channels].contiguous(), dk[..., :channels].contiguous(), dv


def outer(
    rows: tuple[Tensor, Tensor],
    q_lists: Lists,
    k_lists: Lists,
    sums: tuple[Tensor, Tensor],
    queue: Tensor,
    bits: int,
    used: int,
    *,
    walked: bool,
) -> None:
    """Add to `sums` what outer.cu finds: in all buckets, or in those that are not `walked`.

    `queue` counts the runs of pairs that are taken, none yet.
    """
    (q_order, q_first, q_most), (k_order, k_first, k_most) = q_lists, k_lists
    batch, heads, hashes, queries = q_order.shape
    keys, columns, dtype = k_order.shape[3], sums[0].shape[3], sums[0].dtype
    groups, buckets, most = batch * heads, 1 << bits, max(queries, keys)
    small = columns == 64 and not walked
    run, each, above = 32, 1, (0, 0)  # a warp walks a run of buckets
    cache, tokens = _cache_bytes(q_order.device), RUN_TOKENS
    side = (6 + dtype.itemsize) * columns * most  # bytes that it reads of a head, and adds to
    if small and 2 * side > cache and used * most < tokens * _places(q_order.device):
        tokens //= 2  # there is room for rows and sums of one side: runs of two shall not meet
    while run > 2 and (most * run > tokens << bits or groups * used << bits < run * MANY_RUNS):
        run //= 2
    a_head = used * -(-buckets // run)  # runs
    kept = 2 * a_head * run * columns**2 * dtype.itemsize  # bytes: tables of two sides of a head
    few, many = FEW_ROWS[most >= 32 << bits], 8 * most >> bits
    in_pairs = not walked and most < few << bits
    # In phases where the cache has no room for rows and sums of a side, if there is work for all.
    in_phases = small and side > cache
    in_phases = in_phases and not in_pairs and a_head >= MANY_RUNS // 4 and kept <= sums[1].nbytes
    # Where little or nothing is left to tables, a warp looks through many buckets.
    if walked:
        above, each = (MOST_ROWS, 1 << 30), 32
    elif in_pairs:
        above, each = (few, few), 4 if most <= few // 2 << bits else 1
    elif in_phases:
        above, each = (many, many), 4
    tables = 2 * groups * used * -(-buckets // (run * each))
    launch = functools.partial(_outer, columns, q_order.dtype, dtype)
    sides = (
        *rows, q_order, k_order, q_first, k_first, *sums, queries, keys, hashes, used, buckets,
    )  # fmt: skip
    large = run, each, q_most, k_most, *above
    if in_pairs:
        lengths = [min(32, max(2, (x << bits) // most)) for x in QUEUE_TOKENS]
        blocks = min(_places(q_order.device), groups * used * -(-buckets // lengths[1]))
        from_queue = groups, -(-groups // LATE), *lengths, queue
        if columns == 64:
            launch(few)("outer_both", tables + blocks, 32, *sides, *large, tables, *from_queue)
            return
        room = 8 * columns * few  # bytes, as pairs.cuh has it: rows of two buckets
        launch(few)("outer_pairs", blocks, columns // 2, *sides, *from_queue, shared=room)
    if in_phases:
        store = torch.empty(kept, dtype=torch.uint8, device=q_order.device)
        order = q_most.new_empty(1 + 2 * groups * (1 + a_head))
        launch(0)("clear", -(-order.numel() // 256), 256, order, order.numel())
        launch(0)(
            "outer_phased", 4 * groups * a_head, 32, *sides, run, many, store, order, 2 * groups
        )
    launch(0)("outer_tables", tables, 32 if columns == 64 else 128, *sides, *large)


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

    Of a bucket of more than DRAWN tokens (walk.cu), that many are drawn for each token that meets
    it, and stand for all: right on average, and linear whatever the sizes.
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
    each = 256 * 8 // columns * ROW_PARTS
    return 2 * -(-a.shape[0] * a.shape[1] * max(a.shape[2], b.shape[2]) // each)


@functools.cache
def _cache_bytes(device: torch.device) -> int:
    """Of the second level."""
    return torch.cuda.get_device_properties(device).L2_cache_size


@functools.cache
def _places(device: torch.device) -> int:
    """For warps of outer.cu."""
    return PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _launch_rows(channels: int, width: int, dtype: torch.dtype) -> Callable[..., None]:
    return nvrtc.launcher(ROWS, D=channels, E=width, W=_columns(channels, width), X=TYPES[dtype])


@functools.cache
def _outer(columns: int, index: torch.dtype, sums: torch.dtype, light: int) -> Callable[..., None]:
    return nvrtc.launcher(OUTER, W=columns, INDEX=INDICES[index], SUMS=TYPES[sums], LIGHT=light)
