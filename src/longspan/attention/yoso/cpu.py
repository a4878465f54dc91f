"""YOSO on a CPU: both passes as torch.library ops, and the verbs of csrc/ they are made of."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import dispatch
from longspan.attention.random import Seed
from longspan.attention.yoso import library
from longspan.attention.yoso.hashing import projections

# Widths of the transform that 16-bit integers have the digits for. Narrower ones have projections
# that are zero but for rounding, whose signs only the reference's own arithmetic repeats.
HADAMARD_WIDTHS = (16, 32, 64, 128, 256)
# Heads share the workers; fewer than this are cut into runs of hashes, whose sums are added last.
# It must not follow the number of threads: the order of additions is part of the result.
MIN_ITEMS = 8


def why_not(device: torch.device) -> list[str]:
    """Why the kernels cannot run on a device; empty where they can."""
    if device.type != "cpu":
        return dispatch.no_kernel("yoso", device)
    return [library.missing] if library.missing else []


def why_not_these(q: Tensor, v: Tensor) -> list[str]:
    """Why the kernels cannot run on these tensors; empty where they can."""
    return (
        []
        if q.dtype in library.TYPES
        else [f"yoso has no fused kernel for {q.dtype} on cpu devices"]
    )


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
    seed = seed.to(q.device) if isinstance(seed, Tensor) else torch.full((), seed)
    sizes = num_hashes, hash_bits, backward_hashes
    return _Fused.apply(q, k, v, key_mask, seed, *sizes, hashing, gradient, normalize)


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
        num_hashes: int,
        hash_bits: int,
        backward_hashes: int,
        hashing: str,
        gradient: str,
        normalize: bool,
    ) -> Tensor:
        y, total, *saved = torch.ops.longspan.yoso_forward_cpu(
            q, k, v, key_mask, seed, num_hashes, hash_bits, hashing, normalize
        )
        kept = y if v.dtype == torch.float32 else total
        ctx.save_for_backward(q, k, v, key_mask, kept, *saved, seed)
        ctx.options = hash_bits, backward_hashes, gradient, normalize
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.longspan.yoso_backward_cpu(g, *ctx.saved_tensors, *ctx.options)
        return *grads, *[None] * 8


@torch.library.custom_op("longspan::yoso_forward_cpu", mutates_args=(), device_types="cpu")
def yoso_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    seed: Tensor,
    num_hashes: int,
    hash_bits: int,
    hashing: str,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The sum over collisions; 1/norm of its rows; the codes of q and k by hash.

    The second result holds the unit rows before they were rounded to the dtype of v, where they
    were: the gradient needs all their digits, for it is what is left of g across them.
    """
    q_codes, k_codes = hash_codes(q, k, hashing, int(seed), num_hashes, hash_bits)
    buckets = compact_codes(q_codes, k_codes, hash_bits)
    y, total, inverse = collide(
        k_codes, key_mask, v, q_codes, None, buckets, v.dtype, 1 / num_hashes, normalize
    )
    if not (normalize and v.dtype != torch.float32):
        total = torch.empty(0)
    return y, total, inverse, q_codes, k_codes


@yoso_forward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    seed: Tensor,
    num_hashes: int,
    hash_bits: int,
    hashing: str,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    dtype = torch.uint8 if hash_bits <= 8 else torch.uint16
    rounded = normalize and v.dtype != torch.float32
    total = (batch, heads, queries, _padded(v.shape[3])) if rounded else (0,)
    return (
        v.new_empty((batch, heads, queries, v.shape[3])),
        v.new_empty(total, dtype=torch.float32),
        v.new_empty((batch, heads, queries) if normalize else (0,), dtype=torch.float32),
        v.new_empty((batch, heads, num_hashes, queries), dtype=dtype),
        v.new_empty((batch, heads, num_hashes, k.shape[2]), dtype=dtype),
    )


@torch.library.custom_op("longspan::yoso_backward_cpu", mutates_args=(), device_types="cpu")
def yoso_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    y: Tensor,
    inverse: Tensor,
    q_codes: Tensor,
    k_codes: Tensor,
    seed: Tensor,
    hash_bits: int,
    backward_hashes: int,
    gradient: str,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    buckets = _num_buckets(k.shape[2], hash_bits)
    g = through_unit(g, y if normalize else g, inverse if normalize else None, 1 / q_codes.shape[2])
    dv, _, _ = collide(q_codes, None, g, k_codes, key_mask, buckets, v.dtype, 1, False, v.shape[3])
    sampling = buckets, hash_bits, backward_hashes, gradient, int(seed)
    dq, dk = pair_gradients(q, k, v, g, key_mask, q_codes, k_codes, *sampling)
    return dq, dk, dv


@yoso_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def gaussian_planes(
    seed: int, heads: int, num_hashes: int, hash_bits: int, channels: int
) -> Tensor:
    """Gaussian `projections`, drawn by the library: (H, num_hashes, hash_bits, D) in float32."""
    planes = torch.empty(heads, num_hashes, hash_bits, channels)
    assert library.handle is not None
    threads = torch.get_num_threads()
    library.handle.longspan_gaussian(seed, planes.numel(), planes.data_ptr(), threads)
    return planes


def hash_codes(
    q: Tensor, k: Tensor, hashing: str, seed: int, num_hashes: int, hash_bits: int
) -> tuple[Tensor, Tensor]:
    """Codes of queries and keys: (B, H, num_hashes, N), uint8 or uint16."""
    batch, heads, queries, channels = q.shape
    keys, dtype = k.shape[2], torch.uint8 if hash_bits <= 8 else torch.uint16
    q_codes = torch.empty(batch, heads, num_hashes, queries, dtype=dtype)
    k_codes = torch.empty(batch, heads, num_hashes, keys, dtype=dtype)
    hashed = dict(
        q=q, k=k, q_codes=q_codes, k_codes=k_codes, batch=batch, heads=heads, queries=queries,
        keys=keys, channels=channels, hashes=num_hashes, bits=hash_bits,
    )  # fmt: skip
    width = 1 << (channels - 1).bit_length()
    if hashing == "hadamard" and width in HADAMARD_WIDTHS:
        library.call("hadamard_codes", **hashed, seed=seed, width=width)
        return q_codes, k_codes
    if hashing == "hadamard":
        planes = projections(hashing, seed, heads, channels, num_hashes, hash_bits, q.device)
    else:
        planes = gaussian_planes(seed, heads, num_hashes, hash_bits, channels)
    library.call("hash_codes", **hashed, planes=planes)
    return q_codes, k_codes


def _num_buckets(keys: int, hash_bits: int) -> int:
    """Buckets of a hash after `compact_codes`: those of keys, and one for what no key has."""
    return min(1 << hash_bits, keys + 1)


def compact_codes(q_codes: Tensor, k_codes: Tensor, hash_bits: int) -> int:
    """Renumber codes in place where there would be more buckets than keys; return the buckets."""
    batch, heads, hashes, queries = q_codes.shape
    keys = k_codes.shape[3]
    buckets = _num_buckets(keys, hash_bits)
    if buckets < 1 << hash_bits:
        library.call(
            "compact_codes",
            q_codes=q_codes, k_codes=k_codes, groups=batch * heads * hashes,
            queries=queries, keys=keys, bits=hash_bits,
        )  # fmt: skip
    return buckets


def collide(
    from_codes: Tensor,
    from_mask: Tensor | None,
    x: Tensor,
    to_codes: Tensor,
    to_mask: Tensor | None,
    buckets: int,
    dtype: torch.dtype,
    scale: float,
    normalize: bool,
    channels: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """scale · Σ_h Σ_j [same bucket] x_j, as unit rows or not: fill tables, then read them.

    Returns it in `dtype`; the same in float32, rows padded; 1/norm of the rows if normalised.
    """
    batch, heads, hashes, from_tokens = from_codes.shape
    to_tokens, channels = to_codes.shape[3], channels or x.shape[3]
    y = torch.empty(batch, heads, to_tokens, channels, dtype=dtype)
    direct = dtype == torch.float32 and channels == _padded(channels)
    total = y if direct else torch.empty(batch, heads, to_tokens, _padded(channels))
    inverse = torch.empty((batch, heads, to_tokens) if normalize else (0,))
    library.call(
        "collide",
        x=x, from_codes=from_codes, from_mask=from_mask, to_codes=to_codes, to_mask=to_mask,
        total=total, y=y, y_type=library.TYPES[dtype], inverse=inverse if normalize else None,
        scale=scale, batch=batch, heads=heads, from_tokens=from_tokens, to_tokens=to_tokens,
        channels=channels, hashes=hashes, buckets=buckets, wide=_is_wide(from_codes),
    )  # fmt: skip
    return y, total, inverse


def through_unit(g: Tensor, y: Tensor, inverse: Tensor | None, scale: float) -> Tensor:
    """The gradient of the sum from that of its unit rows, times scale: float32, rows padded."""
    batch, heads, tokens, channels = g.shape
    out = torch.empty(batch, heads, tokens, _padded(channels))
    library.call(
        "through_unit",
        g=g, y=y, inverse=inverse, out=out, scale=scale, batch=batch, heads=heads,
        tokens=tokens, channels=channels,
    )  # fmt: skip
    return out


def pair_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    key_mask: Tensor | None,
    q_codes: Tensor,
    k_codes: Tensor,
    buckets: int,
    hash_bits: int,
    backward_hashes: int,
    gradient: str,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """dQ and dK from g, which `through_unit` made and divided by the number of hashes."""
    batch, heads, queries, channels = q.shape
    keys, hashes = k.shape[2], q_codes.shape[2]
    dq, dk = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k))
    num_parts = min(backward_hashes, max(1, MIN_ITEMS // max(1, batch * heads)))
    parts = None
    if num_parts > 1:
        parts = torch.empty(batch, heads, num_parts, queries + keys, _padded(channels))
    true = gradient == "true"
    library.call(
        "pair_gradients",
        q=q, k=k, v=v, g=g, key_mask=key_mask, q_codes=q_codes, k_codes=k_codes, dq=dq, dk=dk,
        parts=parts, scale=(1 if true else hash_bits / 2) * hashes / backward_hashes,
        batch=batch, heads=heads, queries=queries, keys=keys, channels=channels,
        value_channels=v.shape[3], hashes=hashes, used_hashes=backward_hashes, bits=hash_bits,
        buckets=buckets, wide=_is_wide(q_codes), slope=true, num_parts=num_parts,
        seed=seed,
    )  # fmt: skip
    return dq, dk


def _padded(channels: int) -> int:
    return -(-channels // 16) * 16


def _is_wide(codes: Tensor) -> bool:
    return codes.dtype == torch.uint16
