"""The verbs of YOSO's forward on an NVIDIA GPU, and what they are launched with."""

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

CUDA = Path(__file__).with_name("cuda")
HASH, CODES, TABLES, WALK = (CUDA / f"{name}.cu" for name in ("hash", "codes", "tables", "walk"))
TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
INDICES = {torch.uint16: "uint16_t", torch.uint32: "uint32_t"}
MORE_PLANES = 31  # rows after those of any planes, which hash.cu reads and does not use
TABLE_BYTES = 1 << 28  # of tables at a time; more hashes take turns
RUN_BITS = 12  # of codes; above, runs of lists are sorted without the low ones (sort.cuh)
MANY_WARPS = 1 << 13  # of tables.cu: four for each place that an H200 has for them
SUM_ROWS = 512  # of a warp of tables.cu: not too many, so that all parts of the GPU end together
MOST_ROWS = 20  # of a bucket, that walk.cu looks at one by one


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
    rows = heads * num_hashes * hash_bits
    planes = make(rows + MORE_PLANES, padded, dtype=torch.bfloat16, device=device)[:rows]
    planes = planes.view(heads, 1, num_hashes, hash_bits, padded)
    count = heads * num_hashes * hash_bits * channels
    _codes(hash_bits)(
        "gaussian_planes",
        -(-count // 512),
        256,
        *seed_arguments(seed),
        planes,
        count,
        channels,
        padded,
    )
    return planes


def seed_arguments(seed: Seed) -> tuple[Tensor | None, int]:
    """What kernels take: a seed that lies on the GPU, or one that is known here."""
    return (seed, 0) if isinstance(seed, Tensor) else (None, seed)


def plane_pieces(planes: Tensor) -> Tensor:
    """Any `projections` as two bfloat16 pieces that add up to them: (H, 2, m, τ, padded)."""
    planes = F.pad(planes, (0, -planes.shape[3] % 32))
    high = planes.bfloat16()
    pieces = torch.stack([high, (planes - high.float()).bfloat16()], 1)
    more = F.pad(pieces.flatten(0, 3), (0, 0, 0, MORE_PLANES))
    return more[:-MORE_PLANES].view(pieces.shape)


def hash_codes(q: Tensor, k: Tensor, planes: Tensor, *, both: bool) -> tuple[Tensor, ...]:
    """Codes of q by token (B, H, Nq, m) and of k by hash (B, H, m, Nk), which the forward reads.

    If `both`, also those of q by hash and of k by token, which the backward reads. Planes are
    followed by MORE_PLANES rows in memory.
    """
    _, pieces, hashes, hash_bits, padded = planes.shape
    room = planes.untyped_storage().nbytes() // planes.element_size()
    assert room >= planes.numel() + MORE_PLANES * padded, "hash.cu would read what is not there"
    (batch, heads, queries, channels), keys = q.shape, k.shape[2]
    code = torch.uint8 if hash_bits <= 8 else torch.uint16
    new = functools.partial(torch.empty, dtype=code, device=q.device)
    q_token, k_hash = new(batch, heads, queries, hashes), new(batch, heads, hashes, keys)
    q_hash = new(batch, heads, hashes, queries) if both else None
    k_token = new(batch, heads, keys, hashes) if both else None
    # As hash.cu has it: the tokens of a block.
    tiles = -(-channels // 32) * {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[q.dtype]
    block = 256 if tiles <= 2 and hash_bits <= 8 else 128 if tiles <= 4 else 64
    blocks = batch * heads * (-(-queries // block) + -(-keys // block))
    _hash(channels, hash_bits, q.dtype, pieces)(
        "hash_codes", blocks, 128,
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
    lists, launch = batch * heads * hashes, _codes(bits)
    new = functools.partial(torch.empty, device=codes.device)
    # As codes.cu has it: a block sorts so many tokens, half as many where codes take two passes.
    # One that has a multiprocessor to itself takes more: that pays where it takes all of them.
    low, bins, passes = None, 1 << bits, 2 if 8 < bits <= RUN_BITS else 1
    name, tile, threads, shared = "bucket_lists_4k", tokens, 512, 0
    if bits > RUN_BITS:
        low, bins = new(codes.shape, dtype=torch.uint8), bins >> 8
        tile = min(16384, -(-tokens // 64) * 16)  # with log2 n bits, 64 tokens a bin and run
        if tile > 4096:
            name, shared = "bucket_lists_16k", 4 * 16384
    elif 16384 < tokens * passes <= 32768:
        name, threads, shared = "bucket_lists_32k", 1024, 2 * 32768
    elif tokens > 4096:
        name, tile = "bucket_lists_16k", min(tokens, 16384 // passes)
    tiles = -(-tokens // tile)
    runs = new(codes.shape, dtype=torch.uint16)
    first = new(*codes.shape[:3], tiles, bins + 1, dtype=torch.uint32)
    most = new(codes.shape[:3], dtype=torch.uint32)
    launch(
        name, lists * tiles, threads, codes, mask, runs, low, first, most, heads, hashes, tokens,
        tile, shared=shared,
    )  # fmt: skip
    if low is None and tiles == 1:
        return Lists(runs, first[:, :, :, 0], most)
    order = new(codes.shape, dtype=torch.uint16 if tokens <= 1 << 16 else torch.uint32)
    whole = new(*codes.shape[:3], (1 << bits) + 1, dtype=torch.uint32)
    index = 8 * order.element_size()
    if low is not None:
        warps = lists * bins  # four a block
        launch(
            f"bucket_refine_{index}", -(-warps // 4), 128, runs, low, first, order, whole, most,
            warps, tokens, tile,
        )  # fmt: skip
    else:  # bucket by bucket, the runs one after another
        place = new(lists, tiles, bins, dtype=torch.uint32)
        launch("bucket_places", lists, 512, first, place, whole, most, tiles)
        launch(
            f"bucket_merge_{index}", lists * tiles, 512, codes, runs, first, place, order, tokens,
            tile,
        )  # fmt: skip
    return Lists(order, whole, most)


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
        while span > 4 and (
            span * tokens > SUM_ROWS << bits or lists_now << bits < span * MANY_WARPS
        ):
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
    dtype: torch.dtype | None = None,
    *,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """1/m Σ_h Σ_j [same bucket] x_j, and 1/norm of its rows: fill the tables, then read them.

    Where buckets are nearly empty, the rows that a token meets are read one by one instead. In the
    dtype of x, or from float32 in float16.
    """
    batch, heads, tokens, hashes = to_token.shape
    channels, rows, dtype = x.shape[3], batch * heads * tokens, dtype or x.dtype
    sparse = is_sparse(x.shape[2], bits)
    y = x.new_empty((batch, heads, tokens, channels), dtype=x.dtype if sparse else dtype)
    inverse = x.new_empty((batch, heads, tokens) if normalize else (0,), dtype=torch.float32)
    norms = inverse if normalize else None
    blocks = -(-rows * lanes(channels) // 256)
    if sparse:
        heavy = heavy_sum(lists, x, bits)
        launch_walk(8, x, bits, lists.order)(
            "walk_gather", 2 * blocks, 128, to_token, to_mask, lists.order, lists.first, x,
            *_byte_strides(x), heavy, y, norms, heads, hashes, x.shape[2], tokens, rows, 1 / hashes,
        )  # fmt: skip
        return y.to(dtype), inverse
    size = max(1, batch * heads * channels * _table_dtype(x).itemsize << bits)
    step = min(hashes, max(1, TABLE_BYTES // size))
    total = y if step == hashes else torch.empty_like(y, dtype=torch.float32)
    launch = _launch_tables(y, bits, lists.order)
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
    warps = batch * heads * hashes * -(-(1 << bits) // 1024)
    launch_walk(8, x, bits, lists.order)(
        "heavy_sum", -(-warps // 4), 128, *lists, x, *_byte_strides(x), sums,
        heads, hashes, tokens, warps,
    )  # fmt: skip
    return sums


def _table_dtype(x: Tensor) -> torch.dtype:
    """bfloat16 rows were rounded as much before; float16 has not the range for sums."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def lanes(channels: int) -> int:
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


def launch_walk(channels: int, x: Tensor, bits: int, order: Tensor) -> Callable[..., None]:
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
