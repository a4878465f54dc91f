"""Nyström attention on NVIDIA GPUs: both passes as torch.library ops.

    q̃, k̃  means of segments    B v = softmax(q̃ kᵀ) v    W = Z (B v)    output = softmax(q k̃ᵀ) W

No matrix of tokens by landmarks exists in either pass. The gradients of q and k are written once:
what they get through their landmarks is added, by segment, by the pass that writes them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import dispatch, ops, tape
from longspan.attention.nystrom import many_landmarks, reference
from longspan.attention.nystrom.segments import both_segments, lengths

MAX_CHANNELS = 256
MAX_LANDMARKS = 512
IN_ONE_PROGRAM = 128  # landmarks; products of more are left to torch, which spreads them


def why_not(device: torch.device) -> list[str]:
    """Why the kernels cannot run on a device; empty where they can."""
    return dispatch.why_not_cuda("nystrom", device)


def why_not_these(q: Tensor, v: Tensor, num_landmarks: int) -> list[str]:
    """Why the kernels cannot run on these tensors; empty where they can."""
    reasons = dispatch.why_not_these("nystrom", q, v, MAX_CHANNELS)
    if num_landmarks > MAX_LANDMARKS:
        reasons.append(f"nystrom has no fused kernel for more than {MAX_LANDMARKS} landmarks")
    return reasons


def nystrom(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    init: str,
    scale: float | None,
) -> Tensor:
    """Arguments as in `longspan.nystrom`."""
    if q.shape[0] == 0:
        return dispatch.nothing(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    inputs = q, k, v, key_mask, num_landmarks, num_iterations, init == "original", scale
    if dispatch.learns(q, k, v):
        return _Fused.apply(*inputs)
    (y,) = ops.call("nystrom_forward", *inputs, False)
    return y


class _Fused(torch.autograd.Function):
    """The two ops as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        num_landmarks: int,
        num_iterations: int,
        original: bool,
        scale: float,
    ) -> Tensor:
        y, *saved = ops.call(
            "nystrom_forward", q, k, v, key_mask, num_landmarks, num_iterations, original, scale,
            True,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, key_mask, y, *saved)
        ctx.options = num_iterations, original, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        grads = ops.call("nystrom_backward", g, *ctx.saved_tensors, *ctx.options)
        return *grads, None, None, None, None, None


@ops.op
@tape.played
def nystrom_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    original: bool,
    scale: float,
    keep: bool,
) -> list[Tensor]:
    """The output; if the backward is to follow, all that it needs to `keep`: q̃ and k̃ in float32 and
    rounded, B v in float32, W; log₂-sum-exp of both softmaxes; norms of A."""
    from longspan.attention import few, tiles
    from longspan.attention.nystrom import triton as verbs

    q, k, v = (tiles.rows(x) for x in (q, k, v))
    cut = by_query, by_key = both_segments(q, k, key_mask, num_landmarks)
    means, rounded = verbs.segment_means(q, k, num_landmarks, by_query.cut, by_key.cut)
    bv, b_lse = few.read_many(k, v, rounded[0], by_key.mask, scale)
    norms = bv.new_empty(0)
    if num_landmarks > IN_ONE_PROGRAM:
        a = many_landmarks.softmax(*means, cut, scale)
        w = reference.pseudo_inverse(a, num_iterations, "original" if original else "exact") @ bv
        w = many_landmarks.own_values(w, v, by_key).to(v.dtype)
    else:
        first = None if by_key.bounds is None else by_key.bounds[0]
        if original:
            norms = verbs.norms(*means, lengths(cut), scale, q.dtype)
        given = norms.amax().expand_as(norms).contiguous() if original else None
        w = verbs.solve(*means, bv, v, lengths(cut), first, given, num_iterations, scale)
    y, f_lse = few.read_few(q, rounded[1], w, by_key.there, scale)
    return [y, *means, *rounded, bv, w, f_lse, b_lse, norms] if keep else [y]


@ops.fake(nystrom_forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    original: bool,
    scale: float,
    keep: bool,
) -> list[Tensor]:
    batch, heads, queries, channels = q.shape
    width = v.shape[3]
    y = v.new_empty((batch, heads, queries, width))
    if not keep:
        return [y]

    def wide(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    small = batch, heads, num_landmarks
    from_kernel = original and num_landmarks <= IN_ONE_PROGRAM
    return [
        y,
        wide(*small, channels),
        wide(*small, channels),
        q.new_empty((*small, channels)),
        q.new_empty((*small, channels)),
        wide(*small, width),
        v.new_empty((*small, width)),
        wide(batch, heads, queries),
        wide(*small),
        wide(batch, heads) if from_kernel else wide(0),
    ]


@ops.op
@tape.played
def nystrom_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    y: Tensor,
    q_means: Tensor,
    k_means: Tensor,
    q_round: Tensor,
    k_round: Tensor,
    bv: Tensor,
    w: Tensor,
    f_lse: Tensor,
    b_lse: Tensor,
    norms: Tensor,
    num_iterations: int,
    original: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    from longspan.attention import few_backward, tiles
    from longspan.attention.nystrom import triton_backward as verbs

    g, q, k, v = (tiles.rows(x) for x in (g, q, k, v))
    landmarks = q_means.shape[2]
    cut = by_query, by_key = both_segments(q, k, key_mask, landmarks)
    there = by_key.there
    dk_parts, dw = few_backward.few_gradients(q, g, k_round, w, f_lse, scale, y=y, there=there)
    if landmarks > IN_ONE_PROGRAM:
        dbv, dq_means, table_k, table_v = many_landmarks.solve_backward(
            q_means, k_means, bv, dw.sum(0), dk_parts.sum(0), cut,
            many_landmarks.sizes(by_key, k.shape[2], landmarks, k.device),
            num_iterations, original, scale,
        )  # fmt: skip
        delta, dbv = (dbv * bv).sum(-1), dbv.to(q.dtype)
    else:
        given = norms.amax().expand_as(norms).contiguous() if original else None
        dbv, delta, da, dnorm, table_v = verbs.solve_backward(
            q_means, k_means, bv, dw, lengths(cut), given, num_iterations, scale, q.dtype
        )
        if original:  # all heads start from the norm of the largest
            largest = norms == norms.amax()
            dnorm = torch.where(largest, dnorm.sum() / largest.sum(), 0)
        dq_means, table_k = verbs.landmark_gradients(
            q_means, k_means, da, dnorm, dk_parts, lengths(cut), k.shape[2], scale, q.dtype
        )
    few_side = k, v, q_round, dbv, b_lse, scale
    dq_parts, _ = few_backward.few_gradients(*few_side, delta=delta, mask=by_key.mask)
    q_length = None if by_query.bounds is None else by_query.bounds[2]
    table_q = verbs.mean_gradients(dq_means, dq_parts, q_length, q.shape[2])
    dk, dv = few_backward.many_gradients(
        *few_side, delta=delta, mask=by_key.mask, segment=by_key.segment,
        tables=(table_k, None if by_key.bounds is None else table_v),
    )  # fmt: skip
    dq, _ = few_backward.many_gradients(
        q, g, k_round, w, f_lse, scale, y=y, there=there, segment=by_query.segment,
        tables=(table_q, None),
    )  # fmt: skip
    return dq, dk, dv


@ops.fake(nystrom_backward)
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
