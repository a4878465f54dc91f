"""The verbs of YOSO on an NVIDIA GPU, and what they are launched with."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention import nvrtc
from longspan.attention.random import Seed
from longspan.attention.yoso.tables import compact

HASH, CODES, TABLES, ROWS, OUTER, WALK = (
    Path(__file__).with_name("cuda") / f"{name}.cu"
    for name in ("hash", "codes", "tables", "rows", "outer", "walk")
)
TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
INDICES = {torch.uint16: "uint16_t", torch.uint32: "uint32_t"}
TABLE_BYTES = 1 << 28  # of tables at a time; more hashes take turns
MANY_WARPS = 1 << 14  # a dozen for each place that an H200 has for them
MANY_RUNS = 1 << 13  # of outer.cu, likewise
FEW_ROWS = 48, 64  # of a bucket, that outer.cu takes in pairs: of small buckets, and of others
MOST_ROWS = 16  # of a bucket, that walk.cu looks at one by one
FLOAT16_ROOM = 1 << 15  # that sums in float16 may reach


class Lists(NamedTuple):
    """Tokens by bucket."""

    order: Tensor  # (B, H, m, N): tokens sorted by code, uint16 or uint32; masked ones left out
    first: Tensor  # (B, H, m, C + 1): the place of the first of each bucket, uint32
    most: Tensor  # (B, H, m): the tokens of the fullest bucket, uint32


def gaussian_planes(
    seed: Seed,
    heads: int,
    channels: int,
    num_hashes: int,
    hash_bits: int,
    device: torch.device,
) -> Tensor:
    """Gaussian `projections` made on the GPU: (H, 1, m, τ, channels padded), bfloat16."""
    padded = -(-channels // 32) * 32
    make = torch.empty if padded == channels else torch.zeros
    planes = make(heads, 1, num_hashes, hash_bits, padded, dtype=torch.bfloat16, device=device)
    count = heads * num_hashes * hash_bits * channels
    _codes(hash_bits)(
        "gaussian_planes", -(-count // 512), 256, *_seed(seed), planes, count, channels, padded
    )
    return planes


def _seed(seed: Seed) -> tuple[Tensor | None, int]:
    """What kernels take: a seed that lies on the GPU, or one that is known here."""
    return (seed, 0) if isinstance(seed, Tensor) else (None, seed)


def plane_pieces(planes: Tensor) -> Tensor:
    """Any `projections` as two bfloat16 pieces that add up to them: (H, 2, m, τ, padded)."""
    planes = F.pad(planes, (0, -planes.shape[3] % 32))
    high = planes.bfloat16()
    return torch.stack([high, (planes - high.float()).bfloat16()], 1)


def hash_codes(q: Tensor, k: Tensor, planes: Tensor, *, both: bool) -> tuple[Tensor, ...]:
    """Codes of q by token (B, H, Nq, m) and of k by hash (B, H, m, Nk), which the forward reads.

    If `both`, also those of q by hash and of k by token, which the backward reads.
    """
    _, pieces, hashes, hash_bits, _ = planes.shape
    (batch, heads, queries, channels), keys = q.shape, k.shape[2]
    code = torch.uint8 if hash_bits <= 8 else torch.uint16
    new = functools.partial(torch.empty, dtype=code, device=q.device)
    q_token, k_hash = new(batch, heads, queries, hashes), new(batch, heads, hashes, keys)
    q_hash = new(batch, heads, hashes, queries) if both else None
    k_token = new(batch, heads, keys, hashes) if both else None
    # As hash.cu has it: the tokens of a block.
    tiles = -(-channels // 32) * {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[q.dtype]
    block = 256 if tiles <= 4 else 128
    blocks = batch * heads * (-(-queries // block) + -(-keys // block))
    _hash(channels, hash_bits, q.dtype, pieces)(
        "hash_codes", blocks, 256,
        q, *_byte_strides(q), q_token, q_hash, queries,
        k, *_byte_strides(k), k_token, k_hash, keys,
        planes, batch * heads, heads, hashes,
    )  # fmt: skip
    if q_hash is None or k_token is None:
        return q_token, k_hash
    return q_token, k_hash, q_hash, k_token


def _byte_strides(x: Tensor) -> tuple[int, int, int]:
    """Of the samples, heads and rows of x."""
    batch, head, row, _ = x.stride()
    size = x.element_size()
    return batch * size, head * size, row * size


def compact_bits(tokens: int, bits: int) -> int:
    """Bits of codes renumbered so that there are not many more buckets than tokens."""
    return bits if 1 << bits <= max(256, 2 * tokens) else max(8, (tokens - 1).bit_length())


def compact_codes(q_hash: Tensor, k_hash: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes renumbered to fit into fewer bits, those that met still meeting."""
    dtype = torch.uint8 if bits <= 8 else torch.uint16
    q_hash, k_hash, _ = compact(q_hash.int(), k_hash.int(), 1 << 16)
    return q_hash.to(dtype).contiguous(), k_hash.to(dtype).contiguous()


def bucket_lists(codes: Tensor, mask: Tensor | None, bits: int) -> Lists:
    """Tokens of codes (B, H, m, N) by bucket."""
    batch, heads, hashes, tokens = codes.shape
    tile = min(tokens, 8192 if bits > 8 else 16384)  # that shared memory has room for
    tiles = -(-tokens // tile)
    order = torch.empty(codes.shape, dtype=torch.uint16, device=codes.device)
    shape = (batch, heads, hashes, tiles, (1 << bits) + 1)
    first = torch.empty(shape, dtype=torch.uint32, device=codes.device)
    most = torch.empty(shape[:3], dtype=torch.uint32, device=codes.device)
    blocks, launch = batch * heads * hashes * tiles, _codes(bits)
    name = "bucket_lists_4k" if tile <= 4096 else "bucket_lists"
    launch(name, blocks, 512, codes, mask, order, first, most, heads, hashes, tokens, tile)
    if tiles == 1:
        return Lists(order, first[:, :, :, 0], most)
    # Bucket by bucket, the runs one after another.
    place = torch.empty(*shape[:4], 1 << bits, dtype=torch.uint32, device=codes.device)
    whole = torch.empty(*shape[:3], shape[4], dtype=torch.uint32, device=codes.device)
    merged = torch.empty_like(order, dtype=torch.uint16 if tokens <= 1 << 16 else torch.uint32)
    launch("bucket_places", batch * heads * hashes, 512, first, place, whole, most, tiles)
    name = f"bucket_merge_{8 * merged.element_size()}"
    launch(name, blocks, 512, codes, order, first, place, merged, tokens, tile)
    return Lists(merged, whole, most)


def bucket_sum(lists: Lists, x: Tensor, bits: int, h0: int, step: int) -> Tensor:
    """Sum the rows of x (B, H, N, D) by bucket, in `step` hashes from h0 on: (B, H, step, C, D)."""
    batch, heads, hashes, tokens = lists.order.shape
    dtype, channels = _table_dtype(x), x.shape[3]
    shape = (batch, heads, step, 1 << bits, channels)
    table = torch.empty(shape, dtype=dtype, device=x.device)
    # A warp takes a bucket of 32-bit rows, or up to 16 of 16-bit ones.
    name, lists_now, span = "bucket_sum_32", batch * heads * step, 1
    if x.dtype != torch.float32:
        name, span = "bucket_sum_16", 16
        while span > 4 and lists_now << bits < span * MANY_WARPS:
            span //= 2
    blocks = lists_now * -(-(1 << bits) // span)
    if span > 1:
        blocks *= -(-channels // 64)
    _launch_tables(x, bits, lists.order)(
        name, blocks, 32, lists.order, lists.first, x, *_byte_strides(x), table,
        heads, hashes, h0, step, tokens, span,
    )  # fmt: skip
    return table


def collide(
    lists: Lists,
    x: Tensor,
    to_token: Tensor,
    to_mask: Tensor | None,
    bits: int,
    *,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """1/m Σ_h Σ_j [same bucket] x_j, and 1/norm of its rows: fill the tables, then read them.

    Where buckets are nearly empty, the rows that a token meets are read one by one instead.
    """
    batch, heads, tokens, hashes = to_token.shape
    channels, rows = x.shape[3], batch * heads * tokens
    y = x.new_empty((batch, heads, tokens, channels))
    inverse = x.new_empty((batch, heads, tokens) if normalize else (0,), dtype=torch.float32)
    norms = inverse if normalize else None
    blocks = -(-rows * _group(channels) // 256)
    if is_sparse(x.shape[2], bits):
        heavy = heavy_sum(lists, x, bits)
        _launch_walk(8, x, bits, lists.order)(
            "walk_gather", 2 * blocks, 128, to_token, to_mask, lists.order, lists.first, x,
            *_byte_strides(x), heavy, y, norms, heads, hashes, x.shape[2], tokens, rows, 1 / hashes,
        )  # fmt: skip
        return y, inverse
    size = max(1, batch * heads * channels * _table_dtype(x).itemsize << bits)
    step = min(hashes, max(1, TABLE_BYTES // size))
    total = y if step == hashes else torch.empty_like(y, dtype=torch.float32)
    launch = _launch_tables(x, bits, lists.order)
    for h in range(0, hashes, step):
        now = min(step, hashes - h)
        table = bucket_sum(lists, x, bits, h, now)
        launch(
            "bucket_gather", blocks, 256, to_token, to_mask, table, y, total, norms,
            heads, now, hashes, h, tokens, rows, h == 0, h + now == hashes, 1 / hashes,
        )  # fmt: skip
    return y, inverse


def is_sparse(tokens: int, bits: int) -> bool:
    """Whether buckets have so few tokens that walking their lists is cheaper than tables."""
    return tokens <= 2 << bits


def heavy_sum(lists: Lists, x: Tensor, bits: int) -> Tensor:
    """Sums of the rows of x by bucket, for the buckets that walk.cu does not walk."""
    batch, heads, hashes, tokens = lists.order.shape
    shape = (batch, heads, hashes, tokens // MOST_ROWS + 1, x.shape[3])
    sums = torch.empty(shape, dtype=_table_dtype(x), device=x.device)
    warps = batch * heads * hashes * -(-(1 << bits) // 256)
    _launch_walk(8, x, bits, lists.order)(
        "heavy_sum", -(-warps // 4), 128, *lists, x, *_byte_strides(x), sums,
        heads, hashes, tokens, warps,
    )  # fmt: skip
    return sums


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
        _launch_walk(padded, v, bits, q_order)(
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
    each = 128 // _group(max(padded, width))
    blocks = -(-batch * heads * queries // each) + -(-batch * heads * keys // each)
    _launch_walk(padded, v, bits, q_order)(
        "walk_true", blocks, 128, q_hash.mT.contiguous(), k_token, q_order, k_order, q_first,
        k_first, q, k, v, g, triton.norms(q), triton.norms(k, key_mask), key_mask, dq, dk,
        batch * heads, heads, k_token.shape[3], used, queries, keys, *_seed(seed), scale,
    )  # fmt: skip
    return dq[..., :channels].contiguous(), dk[..., :channels].contiguous()


def _columns(channels: int, width: int) -> int:
    return 64 if max(channels, width) <= 64 else 128


def _row_blocks(a: Tensor, b: Tensor, columns: int) -> int:
    """Blocks of rows.cu for the rows of a and b."""
    rows = a.shape[0] * a.shape[1] * (a.shape[2] + b.shape[2])
    return -(-rows * columns // 8 // 256)


def _table_dtype(x: Tensor) -> torch.dtype:
    """bfloat16 rows were rounded as much before; float16 has not the range for sums."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def _group(channels: int) -> int:
    """Lanes that hold a row in the CUDA sources, eight channels each."""
    return max(1, 1 << (-(-channels // 8) - 1).bit_length())


def aligned(x: Tensor) -> Tensor:
    """x itself where its rows lie on 16-byte words, else a copy."""
    words = 16 // x.element_size()
    if x.is_contiguous() and x.shape[3] % words == 0 and x.data_ptr() % 16 == 0:
        return x
    straight = x.stride(3) == 1 and all(s % words == 0 for s in x.stride()[:3])
    if straight and x.data_ptr() % 16 == 0:
        return x
    # Not contiguous(), which gives a contiguous tensor back as it lies.
    return x.clone(memory_format=torch.contiguous_format)


def _launch_tables(x: Tensor, bits: int, order: Tensor) -> Callable[..., None]:
    """The launcher of tables.cu for rows like x."""
    return _tables(x.shape[3], bits, x.dtype, order.dtype)


@functools.cache
def _tables(
    channels: int, bits: int, dtype: torch.dtype, index: torch.dtype
) -> Callable[..., None]:
    table = "BF16" if dtype == torch.bfloat16 else "F32"
    types = dict(X=TYPES[dtype], TABLE=table, INDEX=INDICES[index])
    return nvrtc.launcher(TABLES, D=channels, BITS=bits, **types)


def _launch_walk(channels: int, x: Tensor, bits: int, order: Tensor) -> Callable[..., None]:
    """The launcher of walk.cu for queries of so many channels and values like x."""
    return _walk(channels, x.shape[3], bits, x.dtype, order.dtype)


@functools.cache
def _walk(
    channels: int, width: int, bits: int, dtype: torch.dtype, index: torch.dtype
) -> Callable[..., None]:
    types = dict(X=TYPES[dtype], INDEX=INDICES[index])
    return nvrtc.launcher(WALK, D=channels, E=width, BITS=bits, **types)


@functools.cache
def _hash(channels: int, bits: int, dtype: torch.dtype, pieces: int) -> Callable[..., None]:
    return nvrtc.launcher(HASH, D=channels, BITS=bits, X=TYPES[dtype], PLANES=pieces)


@functools.cache
def _codes(bits: int) -> Callable[..., None]:
    return nvrtc.launcher(CODES, BITS=bits)


@functools.cache
def _launch_rows(channels: int, width: int) -> Callable[..., None]:
    return nvrtc.launcher(ROWS, D=channels, E=width, W=_columns(channels, width))


@functools.cache
def _outer(columns: int, index: torch.dtype, light: int) -> Callable[..., None]:
    return nvrtc.launcher(OUTER, W=columns, INDEX=INDICES[index], LIGHT=light)
