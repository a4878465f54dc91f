"""YOSO on NVIDIA GPUs: both passes as torch.library ops, made of `verbs` and `verbs_backward`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import dispatch, ops, tape
from longspan.attention.random import Seed
from longspan.attention.yoso import verbs, verbs_backward
from longspan.attention.yoso.hashing import projections

MAX_CHANNELS = 256
PART_BYTES = 1 << 28  # of the parts of gradients at a time; more heads take turns


def why_not(device: torch.device) -> list[str]:
    """Why the kernels cannot run on a device; empty where they can."""
    return dispatch.why_not_cuda("yoso", device)


def why_not_these(q: Tensor, v: Tensor) -> list[str]:
    """Why the kernels cannot run on these tensors; empty where they can."""
    reasons = []
    if q.dtype not in verbs.TYPES:
        reasons.append(f"yoso has no fused kernel for {q.dtype}")
    if max(q.shape[3], v.shape[3]) > MAX_CHANNELS:
        reasons.append(f"yoso has no fused kernel for more than {MAX_CHANNELS} channels")
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
    if q.shape[0] == 0:  # nothing to launch: empty, and still a function of all three
        return (q.sum() + k.sum()) * v.new_zeros(0, q.shape[1], q.shape[2], 1) * v.sum(2, True)
    width = v.shape[3]
    planes = None
    if hashing == "hadamard":
        planes = projections(hashing, seed, q.shape[1], q.shape[3], num_hashes, hash_bits, q.device)
    # The kernel reads it on the GPU, wherever the caller keeps it.
    place, number = (seed.to(q.device), 0) if isinstance(seed, Tensor) else (None, seed)
    if place is None and not torch.compiler.is_compiling():
        number = tape.Number(seed)  # other seeds are no other kind of call
    v = F.pad(v, (0, -width % 8)) if width % 8 else v  # rows of whole 16-byte words
    inputs = q, k, v, key_mask, place, number, planes, num_hashes, hash_bits, normalize
    if dispatch.learns(q, k, v):
        y = _Fused.apply(*inputs, backward_hashes, gradient == "true")
    else:
        (y,) = ops.call("yoso_forward", *inputs, False)
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
        place: Tensor | None,
        number: int,
        planes: Tensor | None,
        num_hashes: int,
        hash_bits: int,
        normalize: bool,
        backward_hashes: int,
        true: bool,
    ) -> Tensor:
        y, *saved = ops.call(
            "yoso_forward", q, k, v, key_mask, place, number, planes, num_hashes, hash_bits,
            normalize, True,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, key_mask, y, *saved, place)
        ctx.options = number, hash_bits, backward_hashes, normalize, true
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        ordered = torch.are_deterministic_algorithms_enabled()
        grads = ops.call("yoso_backward", g, *ctx.saved_tensors, *ctx.options, ordered)
        return *grads, *[None] * 9


@ops.op
@tape.played
def yoso_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    place: Tensor | None,
    number: int,
    planes: Tensor | None,
    num_hashes: int,
    hash_bits: int,
    normalize: bool,
    keep: bool,
) -> list[Tensor]:
    """The sum over collisions; if the backward is to follow, all that it needs to `keep`: 1/norm of
    the rows of the sum, the codes of q by hash and of k by token, of q by token where buckets are
    nearly empty, the lists of k."""
    channels = q.shape[3]
    if channels % 8:  # rows of whole 16-byte words
        q, k = (F.pad(x, (0, -channels % 8)) for x in (q, k))
    q, k, v = (verbs.aligned(x) for x in (q, k, v))
    key_mask = None if key_mask is None else key_mask.contiguous()
    if planes is None:
        pieces = verbs.gaussian_planes(
            number if place is None else place,
            q.shape[1], channels, num_hashes, hash_bits, q.device,
        )  # fmt: skip
    else:
        pieces = verbs.plane_pieces(planes)
    bits = verbs.compact_bits(q.shape[2] + k.shape[2], hash_bits)
    both = keep or bits != hash_bits
    q_token, k_hash, *more = verbs.hash_codes(q, k, pieces, both=both)
    if bits != hash_bits:
        q_hash, k_hash = verbs.compact_codes(more[0], k_hash, bits)
        q_token, more = q_hash.mT.contiguous(), [q_hash, k_hash.mT.contiguous()]
    lists = verbs.bucket_lists(k_hash, key_mask, bits)
    y, inverse = verbs.collide(lists, v, q_token, None, bits, normalize=normalize)
    if not keep:
        return [y]
    walked = verbs.is_sparse(max(q.shape[2], k.shape[2]), bits)
    return [y, inverse, *more, q_token if walked else q_token.new_empty(0), *lists]


@ops.fake(yoso_forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    place: Tensor | None,
    number: int,
    planes: Tensor | None,
    num_hashes: int,
    hash_bits: int,
    normalize: bool,
    keep: bool,
) -> list[Tensor]:
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    bits = verbs.compact_bits(queries + keys, hash_bits)
    y = v.new_empty((batch, heads, queries, v.shape[3]))
    if not keep:
        return [y]
    code = torch.uint8 if bits <= 8 else torch.uint16
    index = torch.uint16 if keys <= 1 << 16 else torch.uint32
    walked = verbs.is_sparse(max(queries, keys), bits)
    return [
        y,
        v.new_empty((batch, heads, queries) if normalize else (0,), dtype=torch.float32),
        v.new_empty((batch, heads, num_hashes, queries), dtype=code),
        v.new_empty((batch, heads, keys, num_hashes), dtype=code),
        v.new_empty((batch, heads, queries, num_hashes) if walked else (0,), dtype=code),
        v.new_empty((batch, heads, num_hashes, keys), dtype=index),
        v.new_empty((batch, heads, num_hashes, (1 << bits) + 1), dtype=torch.uint32),
        v.new_empty((batch, heads, num_hashes), dtype=torch.uint32),
    ]


@ops.op
@tape.played
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
    q_token: Tensor,
    k_order: Tensor,
    k_first: Tensor,
    k_most: Tensor,
    place: Tensor | None,
    number: int,
    hash_bits: int,
    backward_hashes: int,
    normalize: bool,
    true: bool,
    ordered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The surrogate or true gradients of q and k, `ordered` with sums in one order, and of v."""
    from longspan.attention.yoso import triton

    bits = verbs.compact_bits(q.shape[2] + k.shape[2], hash_bits)
    k_lists = verbs.Lists(k_order, k_first, k_most)
    dtype = v.dtype
    fast = dtype != torch.float32 and max(q.shape[3], v.shape[3]) <= 128
    fast = fast and not true and not ordered
    if dtype == torch.float16 and not fast:
        # It has neither the range for gradients divided by norms nor the digits for products.
        q, k, v, g, y = (x.float() for x in (q, k, v, g, y))
    q, k, v, g = (verbs.aligned(x.contiguous()) for x in (q, k, v, g))
    key_mask = None if key_mask is None else key_mask.contiguous()
    q_lists = verbs.bucket_lists(q_hash, None, bits)
    if fast:
        unit = (y, inverse) if normalize else None
        scale = hash_bits / 2 / backward_hashes
        return verbs_backward.surrogate(
            q, k, v, g, unit, key_mask, q_token, k_token, q_lists, k_lists,
            bits, scale, backward_hashes,
        )  # fmt: skip
    if normalize:
        g = triton.through_unit(g, y, inverse)
    dv, _ = verbs.collide(q_lists, g, k_token, key_mask, bits, normalize=False)
    if true:
        scale = hash_bits / backward_hashes
        dq, dk = verbs_backward.true_gradient(
            q, k, v, g, key_mask, q_hash, k_token, q_lists, k_lists, bits, scale, backward_hashes,
            number if place is None else place,
        )  # fmt: skip
    else:
        room = max(PART_BYTES, 4 * v.numel() * v.itemsize)
        scale = hash_bits / 2 / backward_hashes
        dq, dk = triton.outer_sums(
            q, k, v, g, key_mask, q_lists, k_lists, scale, backward_hashes, room
        )
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


@ops.fake(yoso_backward)
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
