"""The verbs of YOSO on an NVIDIA GPU, and what they are launched with."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention import nvrtc
from longspan.attention.yoso.tables import compact

CODES, TABLES, OUTER = (
    Path(__file__).with_name("cuda") / f"{name}.cu" for name in ("codes", "tables", "outer")
)
TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
TABLE_BYTES = 1 << 28  # of tables at a time; more hashes take turns
MANY_WARPS = 1 << 14  # a dozen for each place that an H200 has for them
FLOAT16_ROOM = 1 << 15  # that sums in float16 may reach


class Lists(NamedTuple):
    """Tokens by bucket."""

    order: Tensor  # (B, H, m, N): tokens sorted by code, uint16 or uint32; masked ones left out
    first: Tensor  # (B, H, m, C + 1): the place of the first of each bucket, uint32


def hash_codes(x: Tensor, tiles: Tensor, hash_bits: int) -> tuple[Tensor, Tensor]:
    """Codes of x (B, H, N, D): by token (B, H, N, m) and by hash (B, H, m, N)."""
    from longspan.attention.yoso import triton

    return triton.hash_codes(x, tiles, hash_bits)


def gaussian_planes(
    seed: Tensor, heads: int, channels: int, num_hashes: int, hash_bits: int
) -> Tensor:
    """Gaussian `projections` made on the GPU: (H, 1, m, 8 or 16, channels padded), bfloat16."""
    bits, padded = _tile(hash_bits, channels)
    make = torch.empty if (bits, padded) == (hash_bits, channels) else torch.zeros
    planes = make(heads, 1, num_hashes, bits, padded, dtype=torch.bfloat16, device=seed.device)
    count = heads * num_hashes * hash_bits * channels
    _launcher(CODES, BITS=hash_bits)(
        "gaussian_planes", -(-count // 512), 256, seed, planes, count, channels, bits, padded
    )
    return planes


def plane_tiles(planes: Tensor) -> Tensor:
    """Any `projections` as two bfloat16 pieces that add up to them: (H, 2, m, 8 or 16, padded)."""
    bits, padded = _tile(*planes.shape[2:])
    planes = F.pad(planes, (0, padded - planes.shape[3], 0, bits - planes.shape[2]))
    high = planes.bfloat16()
    return torch.stack([high, (planes - high.float()).bfloat16()], 1)


def _tile(hash_bits: int, channels: int) -> tuple[int, int]:
    """Bits and channels padded to what matrix instructions take."""
    return 8 * -(-hash_bits // 8), max(16, 1 << (channels - 1).bit_length())


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
    blocks, launch = batch * heads * hashes * tiles, _launcher(CODES, BITS=bits)
    name = "bucket_lists_4k" if tile <= 4096 else "bucket_lists"
    launch(name, blocks, 512, codes, mask, order, first, heads, hashes, tokens, tile)
    if tiles == 1:
        return Lists(order, first[:, :, :, 0])
    # Bucket by bucket, the runs one after another.
    edges = first.view(torch.int32)
    counts = edges.diff(dim=4).transpose(3, 4).flatten(3)
    ends = counts.cumsum(3, dtype=torch.int32)
    place = (ends - counts).unflatten(3, (-1, tiles)).transpose(3, 4).contiguous()
    merged = torch.empty_like(order, dtype=torch.uint16 if tokens <= 1 << 16 else torch.uint32)
    name = f"bucket_merge_{8 * merged.element_size()}"
    launch(name, blocks, 512, codes, order, first, place, merged, tokens, tile)
    edges = torch.cat([place[:, :, :, 0], ends[..., -1:]], 3)
    return Lists(merged, edges.view(torch.uint32))


def bucket_sum(lists: Lists, x: Tensor, bits: int, h0: int, step: int) -> Tensor:
    """Sum the rows of x (B, H, N, D) by bucket, in `step` hashes from h0 on: (B, H, step, C, D)."""
    batch, heads, hashes, tokens = lists.order.shape
    dtype, channels = _table_dtype(x), x.shape[3]
    shape = (batch, heads, step, 1 << bits, channels)
    table = torch.empty(shape, dtype=dtype, device=x.device)
    name, blocks = "bucket_sum_32", batch * heads * step << bits
    if x.dtype != torch.float32:
        name = "bucket_sum_16"
        blocks = batch * heads * step * -(-(1 << bits) // 16) * -(-channels // 64)
    strides = (s * x.element_size() for s in x.stride()[:3])
    _launch_tables(x, bits, lists.order)(
        name, blocks, 32, lists.order, lists.first, x, *strides, table,
        heads, hashes, h0, step, tokens,
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
    """1/m Σ_h Σ_j [same bucket] x_j, and 1/norm of its rows: fill the tables, then read them."""
    batch, heads, tokens, hashes = to_token.shape
    channels = x.shape[3]
    y = x.new_empty((batch, heads, tokens, channels))
    inverse = x.new_empty((batch, heads, tokens) if normalize else (0,), dtype=torch.float32)
    size = max(1, batch * heads * channels * _table_dtype(x).itemsize << bits)
    step = min(hashes, max(1, TABLE_BYTES // size))
    total = y if step == hashes else torch.empty_like(y, dtype=torch.float32)
    launch, rows = _launch_tables(x, bits, lists.order), batch * heads * tokens
    for h in range(0, hashes, step):
        now = min(step, hashes - h)
        table = bucket_sum(lists, x, bits, h, now)
        launch(
            "bucket_gather", -(-rows * _group(channels) // 256), 256, to_token, to_mask, table, y,
            total, inverse if normalize else None, heads, now, hashes, h, tokens, rows,
            h == 0, h + now == hashes, 1 / hashes,
        )  # fmt: skip
    return y, inverse


def outer_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    key_mask: Tensor | None,
    q_lists: Lists,
    k_lists: Lists,
    scale: float,
    used: int,
) -> tuple[Tensor, Tensor]:
    """dQ_i = scale Σ_h Σ_j [same bucket] (g_i·v_j) k̂_j through the norm of q_i, and dK likewise.

    Contiguous rows (B, H, N, D) of up to 128 channels; the first `used` hashes. The kernel adds in
    float16, in no fixed order; rows are scaled so that no sum leaves its range.
    """
    from longspan.attention.yoso import triton

    (batch, heads, queries, channels), (keys, width) = q.shape, v.shape[2:]
    hashes, buckets = q_lists.first.shape[2], q_lists.first.shape[3] - 1
    columns = 64 if max(channels, width) <= 64 else 128
    g_norms, v_norms = triton.norms(g), triton.norms(v, key_mask)
    g_total, v_total = g_norms.sum(2), v_norms.sum(2)
    room = FLOAT16_ROOM / used
    q_rows = triton.pair_rows(g, q, g_norms, g_total, room, columns)
    k_rows = triton.pair_rows(v, k, v_norms, v_total, room, columns)
    dq, dk = (
        torch.zeros(batch, heads, n, columns, dtype=torch.float16, device=q.device)
        for n in (queries, keys)
    )
    (q_order, q_first), (k_order, k_first) = q_lists, k_lists
    if q_order.dtype != k_order.dtype:
        q_order, k_order = q_order.to(torch.uint32), k_order.to(torch.uint32)
    # A warp walks a run of buckets; enough runs that all parts of the GPU end about together.
    lists, run = batch * heads * used, 32
    while run > 4 and lists * buckets // run < MANY_WARPS:
        run //= 2
    runs = lists * -(-buckets // run)
    launch = _launcher(OUTER, W=columns, INDEX=_index(q_order))
    arguments = (
        q_rows, k_rows, q_order, k_order, q_first, k_first, dq, dk,
        queries, keys, hashes, used, buckets, run,
    )  # fmt: skip
    if columns == 64:
        launch("outer_pairs", runs, 32, *arguments)
    launch("outer_tables", 2 * runs * (1 if columns == 64 else 4), 32, *arguments)
    scale /= room
    return (
        triton.finish(dq, q, g_norms, v_total, scale),
        triton.finish(dk, k, v_norms, g_total, scale),
    )


def _table_dtype(x: Tensor) -> torch.dtype:
    """bfloat16 rows were rounded as much before; float16 has not the range for sums."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def _group(channels: int) -> int:
    """Lanes that hold a row in cuda.cu, eight channels each."""
    return max(1, 1 << (-(-channels // 8) - 1).bit_length())


def aligned(x: Tensor) -> Tensor:
    """x itself where its rows lie on 16-byte words, else a copy."""
    words = 16 // x.element_size()
    straight = x.stride(3) == 1 and all(s % words == 0 for s in x.stride()[:3])
    if straight and x.data_ptr() % 16 == 0:
        return x
    # Not contiguous(), which gives a contiguous tensor back as it lies.
    return x.clone(memory_format=torch.contiguous_format)


def _launch_tables(x: Tensor, bits: int, order: Tensor) -> Callable[..., None]:
    """The launcher of tables.cu for rows like x."""
    types = dict(X=TYPES[x.dtype], TABLE=TYPES[_table_dtype(x)], INDEX=_index(order))
    return _launcher(TABLES, D=x.shape[3], BITS=bits, **types)


def _index(order: Tensor) -> str:
    return "uint16_t" if order.dtype == torch.uint16 else "uint32_t"


_launcher = functools.cache(nvrtc.launcher)
