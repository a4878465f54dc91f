"""YOSO on NVIDIA GPUs: both passes as torch.library ops, and the verbs they are made of."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import dispatch, nvrtc
from longspan.attention.random import Seed
from longspan.attention.yoso.hashing import projections
from longspan.attention.yoso.tables import compact

SOURCE = Path(__file__).with_name("cuda.cu")
TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
# Tiles of wider float32 rows, which float16 is multiplied in too, do not fit into shared memory.
MAX_CHANNELS = {torch.bfloat16: 256, torch.float16: 128, torch.float32: 128}
TABLE_BYTES = 1 << 28  # of tables at a time; more hashes take turns
PART_BYTES = 1 << 28  # of the parts of gradients at a time; more heads take turns


def why_not(device: torch.device) -> list[str]:
    """Why the kernels cannot run on a device; empty where they can."""
    if device.type != "cuda":
        return dispatch.no_kernel("yoso", device)
    if not torch.cuda.is_available():
        return ["yoso needs an NVIDIA GPU, and torch sees none"]
    reasons = []
    try:
        import cuda.core  # noqa: F401
        import triton  # noqa: F401
    except ImportError as error:
        reasons.append(f"yoso needs {error.name} (pip install 'longspan[cuda]')")
    if torch.cuda.get_device_capability(device) < (8, 0):
        reasons.append("yoso needs a GPU of compute capability 8.0 or newer")
    return reasons


def why_not_these(q: Tensor, v: Tensor, gradient: str) -> list[str]:
    """Why the kernels cannot run on these tensors; empty where they can."""
    reasons = []
    if q.dtype not in MAX_CHANNELS:
        reasons.append(f"yoso has no fused kernel for {q.dtype}")
    elif max(q.shape[3], v.shape[3]) > MAX_CHANNELS[q.dtype]:
        most = MAX_CHANNELS[q.dtype]
        reasons.append(f"yoso has no fused kernel for more than {most} channels of {q.dtype}")
    if gradient == "true":
        reasons.append("yoso has no fused kernel for gradient='true'")
    return reasons


def yoso(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    num_hashes: int,
    hash_bits: int,
    hashing: str,
    gradient: str,
    backward_hashes: int,
    normalize: bool,
    seed: Seed,
) -> Tensor:
    """Sampled attention; arguments as in `longspan.yoso`."""
    if backward_hashes != num_hashes:
        raise NotImplementedError(
            "backward_hashes has no fused kernel on a GPU; impl='reference' has"
        )
    if q.shape[0] == 0:  # nothing to launch: empty, and still a function of all three
        return (q.sum() + k.sum()) * v.new_zeros(0, q.shape[1], q.shape[2], 1) * v.sum(2, True)
    width = v.shape[3]
    planes = None
    if hashing == "hadamard":
        planes = projections(hashing, seed, q.shape[1], q.shape[3], num_hashes, hash_bits, q.device)
    # The kernel reads it on the GPU, wherever the caller keeps it.
    seed = seed.to(q.device) if isinstance(seed, Tensor) else torch.full((), seed, device=q.device)
    v = F.pad(v, (0, -width % 8)) if width % 8 else v  # rows of whole 16-byte words
    y = _Fused.apply(q, k, v, key_mask, seed, planes, num_hashes, hash_bits, normalize)
    return y[..., :width] if width % 8 else y


class _Fused(torch.autograd.Function):
    """The two ops as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        seed: Tensor,
        planes: Tensor | None,
        num_hashes: int,
        hash_bits: int,
        normalize: bool,
    ) -> Tensor:
        y, *saved = torch.ops.longspan.yoso_forward(
            q, k, v, key_mask, seed, planes, num_hashes, hash_bits, normalize
        )
        ctx.save_for_backward(q, k, v, key_mask, y, *saved)
        ctx.hash_bits, ctx.normalize = hash_bits, normalize
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        options = ctx.hash_bits, ctx.normalize
        grads = torch.ops.longspan.yoso_backward(g, *ctx.saved_tensors, *options)
        return *grads, None, None, None, None, None, None


@torch.library.custom_op("longspan::yoso_forward", mutates_args=(), device_types="cuda")
def yoso_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    seed: Tensor,
    planes: Tensor | None,
    num_hashes: int,
    hash_bits: int,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum over collisions, 1/norm of its rows; codes: q by hash, k by token and by hash."""
    with torch.cuda.device(q.device):
        q, k, v = (_aligned(x) for x in (q, k, v))
        key_mask = None if key_mask is None else key_mask.contiguous()
        if planes is None:
            tiles = gaussian_planes(seed, q.shape[1], q.shape[3], num_hashes, hash_bits)
        else:
            tiles = plane_tiles(planes)
        q_token, q_hash = hash_codes(q, tiles, hash_bits)
        k_token, k_hash = hash_codes(k, tiles, hash_bits)
        q_table, k_table, bits = _compact(q_hash, k_hash, hash_bits)
        if bits != hash_bits:
            q_token = q_table.mT.contiguous()
            k_token, q_hash, k_hash = k_table.mT.contiguous(), q_table, k_table
        y, inverse = collide(k_hash, key_mask, v, q_token, None, bits, normalize)
    return y, inverse, q_hash, k_token, k_hash


@yoso_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    seed: Tensor,
    planes: Tensor | None,
    num_hashes: int,
    hash_bits: int,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    bits = _compact_bits(queries + keys, hash_bits)
    dtype = torch.uint8 if bits <= 8 else torch.uint16
    return (
        v.new_empty((batch, heads, queries, v.shape[3])),
        v.new_empty((batch, heads, queries) if normalize else (0,), dtype=torch.float32),
        v.new_empty((batch, heads, num_hashes, queries), dtype=dtype),
        v.new_empty((batch, heads, keys, num_hashes), dtype=dtype),
        v.new_empty((batch, heads, num_hashes, keys), dtype=dtype),
    )


@torch.library.custom_op("longspan::yoso_backward", mutates_args=(), device_types="cuda")
def yoso_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    y: Tensor,
    inverse: Tensor,
    q_hash: Tensor,
    k_token: Tensor,
    k_hash: Tensor,
    hash_bits: int,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The surrogate gradients of q and k and the gradient of v."""
    from longspan.attention.yoso import triton

    # float16 products would lose digits that the reference keeps.
    dtype = torch.bfloat16 if v.dtype == torch.bfloat16 else torch.float32
    bits = _compact_bits(q.shape[2] + k.shape[2], hash_bits)
    with torch.cuda.device(q.device):
        q, k, v, g = (_aligned(x.contiguous()) for x in (q, k, v, g))
        key_mask = None if key_mask is None else key_mask.contiguous()
        if normalize:
            g = triton.through_unit(g, y, inverse)
        dv, _ = collide(q_hash, None, g, k_token, key_mask, bits, False)
        norms = triton.inverse_norms(q), triton.inverse_norms(k, key_mask)
        lists = bucket_lists(q_hash, None, bits), bucket_lists(k_hash, key_mask, bits)
        scale = hash_bits / 2 / q_hash.shape[2]
        room = max(PART_BYTES, 4 * v.numel() * dtype.itemsize)
        dq, dk = triton.outer_sums(
            q.to(dtype), k.to(dtype), v.to(dtype), g.to(dtype), *norms, *lists, scale, room
        )
    dq, dk = dq.to(q.dtype), dk.to(k.dtype)
    return dq, dk, dv


@yoso_backward.register_fake
def _(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    y: Tensor,
    inverse: Tensor,
    q_hash: Tensor,
    k_token: Tensor,
    k_hash: Tensor,
    hash_bits: int,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def collide(
    from_hash: Tensor,
    from_mask: Tensor | None,
    x: Tensor,
    to_token: Tensor,
    to_mask: Tensor | None,
    bits: int,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """1/m Σ_h Σ_j [same bucket] x_j, and 1/norm of its rows: fill the tables, then read them."""
    batch, heads, hashes, _ = from_hash.shape
    tokens, channels = to_token.shape[2], x.shape[3]
    table_dtype = _table_dtype(x)
    y = x.new_empty((batch, heads, tokens, channels))
    inverse = x.new_empty((batch, heads, tokens) if normalize else (0,), dtype=torch.float32)
    size = max(1, batch * heads * channels * table_dtype.itemsize << bits)
    step = min(hashes, max(1, TABLE_BYTES // size))
    total = y if step == hashes else torch.empty_like(y, dtype=torch.float32)
    for h in range(0, hashes, step):
        codes = from_hash if step == hashes else from_hash[:, :, h : h + step].contiguous()
        table = bucket_sum(codes, from_mask, x, bits)
        _launch(channels, bits, x.dtype, table_dtype)(
            "bucket_gather", -(-batch * heads * tokens // 8), 256, to_token, to_mask, table, y,
            total, inverse if normalize else None, heads, codes.shape[2], hashes, h, tokens,
            batch * heads * tokens, h == 0, h + step >= hashes, 1 / hashes,
        )  # fmt: skip
    return y, inverse


def bucket_sum(codes: Tensor, mask: Tensor | None, x: Tensor, bits: int) -> Tensor:
    """Sum the rows of x (B, H, N, D) by bucket: (B, H, m, C, D)."""
    tokens, near = codes.shape[3], _near(x.shape[3], bits)
    tiles = -(-tokens // near)
    # Runs of tokens that fit into shared memory have a table each; their sum is the table.
    dtype = _table_dtype(x) if tiles == 1 else torch.float32
    shape = (*codes.shape[:3], tiles, 1 << bits, x.shape[3])
    table = torch.empty(shape, dtype=dtype, device=x.device)
    _sort(codes, mask, bits, x, table, min(tokens, near), want_list=False)
    return table[:, :, :, 0] if tiles == 1 else table.sum(3).to(_table_dtype(x))


def _table_dtype(x: Tensor) -> torch.dtype:
    """bfloat16 rows were rounded as much before; float16 has not the range for sums."""
    return torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32


def bucket_lists(codes: Tensor, mask: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """Tokens by bucket (B, H, m, N), and the place of the first of each bucket (B, H, m, C + 1)."""
    return _sort(codes, mask, bits, None, None, codes.shape[3], want_list=True)


def _sort(
    codes: Tensor,
    mask: Tensor | None,
    bits: int,
    x: Tensor | None,
    table: Tensor | None,
    tile: int,
    *,
    want_list: bool,
) -> tuple[Tensor, Tensor]:
    """Sort runs of `tile` tokens by their codes; sum the rows of x into the table, if any."""
    batch, heads, hashes, tokens = codes.shape
    channels, dtype, strides = 8, torch.bfloat16, [0] * 3
    if x is not None:
        channels, dtype = x.shape[3], x.dtype
        strides = [s * x.element_size() for s in x.stride()[:3]]
    near = tile <= _near(channels, bits)
    name = "bucket_sum_4k" if tile <= 4096 else "bucket_sum_near" if near else "bucket_sum_far"
    order = codes.new_empty(
        (batch, heads, hashes, tokens if want_list or not near else 0),
        dtype=torch.uint16 if near else torch.uint32,
    )
    blocks = batch * heads * hashes * -(-tokens // tile)
    first = codes.new_empty((blocks, (1 << bits) + 1), dtype=torch.uint32)
    spare = torch.empty_like(order) if bits > 8 and not near else None
    _launch(channels, bits, dtype, dtype if table is None else table.dtype)(
        name, blocks, 512, codes, mask, x, *strides, table,
        order if order.numel() else None, spare, first, heads, hashes, tokens, tile,
    )  # fmt: skip
    return order, first.view(batch, heads, hashes, -1)


def _near(channels: int, bits: int) -> int:
    """Tokens that cuda.cu can sort in shared memory."""
    return (8192 if channels > 128 else 16384) // (2 if bits > 8 else 1)


def _compact_bits(tokens: int, bits: int) -> int:
    """Bits of codes renumbered so that there are not many more buckets than tokens."""
    return bits if 1 << bits <= max(256, 2 * tokens) else max(8, (tokens - 1).bit_length())


def _compact(q_hash: Tensor, k_hash: Tensor, hash_bits: int) -> tuple[Tensor, Tensor, int]:
    """Renumber codes where there are more buckets than tokens."""
    bits = _compact_bits(q_hash.shape[-1] + k_hash.shape[-1], hash_bits)
    if bits == hash_bits:
        return q_hash, k_hash, bits
    dtype = torch.uint8 if bits <= 8 else torch.uint16
    q_hash, k_hash, _ = compact(q_hash.int(), k_hash.int(), 1 << 16)
    return q_hash.to(dtype).contiguous(), k_hash.to(dtype).contiguous(), bits


def hash_codes(x: Tensor, tiles: Tensor, hash_bits: int) -> tuple[Tensor, Tensor]:
    """Codes of x (B, H, N, D): by token (B, H, N, m) and by hash (B, H, m, N)."""
    from longspan.attention.yoso import triton

    return triton.hash_codes(x, tiles, hash_bits)


def gaussian_planes(
    seed: Tensor, heads: int, channels: int, num_hashes: int, hash_bits: int
) -> Tensor:
    """Gaussian `projections` made on the GPU: (H, 1, m, 8 or 16, channels padded), bfloat16."""
    bits, padded = _tile(hash_bits, channels)
    shape = (heads, 1, num_hashes, bits, padded)
    planes = torch.zeros(shape, dtype=torch.bfloat16, device=seed.device)
    count = heads * num_hashes * hash_bits * channels
    _launch(8, hash_bits, torch.bfloat16, torch.bfloat16)(
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


def _aligned(x: Tensor) -> Tensor:
    """x itself where its rows lie on 16-byte words, else a copy."""
    words = 16 // x.element_size()
    straight = x.stride(3) == 1 and all(s % words == 0 for s in x.stride()[:3])
    if straight and x.data_ptr() % 16 == 0:
        return x
    # Not contiguous(), which gives a contiguous tensor back as it lies.
    return x.clone(memory_format=torch.contiguous_format)


@functools.cache
def _launch(
    channels: int, bits: int, dtype: torch.dtype, table_dtype: torch.dtype
) -> Callable[..., None]:
    """The launcher of cuda.cu for rows of a width and type, tables of a type, and codes."""
    return nvrtc.launcher(SOURCE, D=channels, BITS=bits, X=TYPES[dtype], TABLE=TYPES[table_dtype])
