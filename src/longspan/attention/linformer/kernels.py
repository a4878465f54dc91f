"""Linformer on NVIDIA GPUs: both passes as torch.library ops."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import dispatch, ops, tape

MAX_CHANNELS = 256


def why_not(device: torch.device) -> list[str]:
    """Why the kernels cannot run on a device; empty where they can."""
    return dispatch.why_not_cuda("linformer", device)


def why_not_these(q: Tensor, v: Tensor) -> list[str]:
    """Why the kernels cannot run on these tensors; empty where they can."""
    return dispatch.why_not_these("linformer", q, v, MAX_CHANNELS)


def linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_projection: Tensor,
    value_projection: Tensor,
    key_mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Arguments as in `longspan.linformer`."""
    if q.shape[0] == 0:
        unused = 0 * (key_projection.sum() + value_projection.sum()).to(v.dtype)
        return dispatch.nothing(q, k, v) + unused
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    e, f = key_projection.to(v.dtype), value_projection.to(v.dtype)
    if dispatch.learns(q, k, v, e, f):
        return _Fused.apply(q, k, v, e, f, key_mask, scale)
    return ops.call("linformer_forward", q, k, v, e, f, key_mask, scale)[0]


class _Fused(torch.autograd.Function):
    """The two ops as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        e: Tensor,
        f: Tensor,
        key_mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        y, *saved = ops.call("linformer_forward", q, k, v, e, f, key_mask, scale)
        ctx.save_for_backward(q, k, v, e, f, key_mask, y, *saved)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        learned = any(ctx.needs_input_grad[3:5])
        *grads, de, df = ops.call("linformer_backward", g, *ctx.saved_tensors, ctx.scale, learned)
        return *grads, *((de, df) if learned else (None, None)), None, None


@ops.op
@tape.played
def linformer_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    f: Tensor,
    key_mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output, E k, F v, and the log₂-sum-exp of the softmax."""
    from longspan.attention import few, tiles
    from longspan.attention.linformer import triton as verbs

    q, k, v, e, f = (tiles.rows(x.to(v.dtype)) for x in (q, k, v, e, f))
    mask = None if key_mask is None else key_mask.contiguous()
    short_k, short_v = verbs.project(e, k, mask), verbs.project(f, v, mask)
    y, lse = few.read_few(q, short_k, short_v, None, scale)
    return y, short_k, short_v, lse


@ops.fake(linformer_forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    f: Tensor,
    key_mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, queries, channels = q.shape
    return (
        v.new_empty((batch, heads, queries, v.shape[3])),
        k.new_empty((batch, heads, e.shape[-2], channels)),
        v.new_empty((batch, heads, f.shape[-2], v.shape[3])),
        q.new_empty((batch, heads, queries), dtype=torch.float32),
    )


@ops.op
@tape.played
def linformer_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    e: Tensor,
    f: Tensor,
    key_mask: Tensor | None,
    y: Tensor,
    short_k: Tensor,
    short_v: Tensor,
    lse: Tensor,
    scale: float,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and, where they are learned, of both projections."""
    from longspan.attention import few_backward, tiles
    from longspan.attention.linformer import triton as verbs

    dtype = v.dtype
    g, q, k, v = (tiles.rows(x) for x in (g, q, k, v))
    mask = None if key_mask is None else key_mask.contiguous()
    short = q, g, short_k, short_v, lse, scale
    dq, _ = few_backward.many_gradients(*short, y=y)
    parts = few_backward.few_gradients(*short, y=y)
    short_dk, short_dv = (tiles.add_parts(x, dtype) for x in parts)
    dk, dv = (
        verbs.spread(tiles.rows(p.to(dtype)), x, mask) for p, x in ((e, short_dk), (f, short_dv))
    )
    de, df = (p.new_empty(0) for p in (e, f))
    if learned:
        de = verbs.outer(short_dk, k, mask, e.dim() == 2, e.dtype)
        df = verbs.outer(short_dv, v, mask, f.dim() == 2, f.dtype)
    return dq, dk, dv, de, df


@ops.fake(linformer_backward)
def _(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, e: Tensor, f: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    de, df = (x.new_empty(x.shape if rest[-1] else (0,)) for x in (e, f))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), de, df
