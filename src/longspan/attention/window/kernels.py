"""Window attention on NVIDIA GPUs: both passes as torch.library ops."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import dispatch, ops, tape

MAX_CHANNELS = 256
WIDEST = 1 << 24  # wider than any sequence: places stay within 32 bits


def why_not(device: torch.device) -> list[str]:
    """Why the kernels cannot run on a device; empty where they can."""
    return dispatch.why_not_cuda("window", device)


def why_not_these(q: Tensor, v: Tensor) -> list[str]:
    """Why the kernels cannot run on these tensors; empty where they can."""
    return dispatch.why_not_these("window", q, v, MAX_CHANNELS)


def window(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, window: int, scale: float | None
) -> Tensor:
    """Arguments as in `longspan.window`."""
    if q.shape[0] == 0:
        return dispatch.nothing(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    inputs = q, k, v, key_mask, min(window, WIDEST), scale
    if dispatch.learns(q, k, v):
        return _Fused.apply(*inputs)
    return ops.call("window_forward", *inputs)[0]


class _Fused(torch.autograd.Function):
    """The two ops as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        window: int,
        scale: float,
    ) -> Tensor:
        y, lse = ops.call("window_forward", q, k, v, key_mask, window, scale)
        ctx.save_for_backward(q, k, v, key_mask, y, lse)
        ctx.options = window, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        grads = ops.call("window_backward", g, *ctx.saved_tensors, *ctx.options)
        return *grads, None, None, None


@ops.op
@tape.played
def window_forward(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The output, and the log₂-sum-exp of its softmax."""
    from longspan.attention import tiles
    from longspan.attention.window import triton as verbs

    q, k, v = (tiles.rows(x) for x in (q, k, v))
    mask = None if key_mask is None else key_mask.contiguous()
    return verbs.attend(q, k, v, mask, window, scale)


@ops.fake(window_forward)
def _(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    shape = q.shape[:3]
    return v.new_empty((*shape, v.shape[3])), q.new_empty(shape, dtype=torch.float32)


@ops.op
@tape.played
def window_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    y: Tensor,
    lse: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    from longspan.attention import tiles
    from longspan.attention.window import triton as verbs

    g, q, k, v = (tiles.rows(x) for x in (g, q, k, v))
    mask = None if key_mask is None else key_mask.contiguous()
    return verbs.gradients(g.contiguous(), q, k, v, mask, y, lse, window, scale)


@ops.fake(window_backward)
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
