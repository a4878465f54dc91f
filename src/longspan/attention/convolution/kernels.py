"""The residual convolution on NVIDIA GPUs: both passes as torch.library ops."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import dispatch, ops, tape

MAX_CHANNELS = 256


def why_not(v: Tensor) -> list[str]:
    """Why the kernels cannot run on these values; empty where they can."""
    return dispatch.why_not_cuda("conv_kernel", v.device) or dispatch.why_not_these(
        "conv_kernel", v, v, MAX_CHANNELS
    )


def fused(y: Tensor, v: Tensor, weight: Tensor, key_mask: Tensor | None) -> Tensor:
    """Arguments as in `add_convolution`."""
    return y if v.numel() == 0 else _Fused.apply(y, v, weight, key_mask)


class _Fused(torch.autograd.Function):
    """The two ops as one differentiable function."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, v: Tensor, weight: Tensor, key_mask: Tensor | None) -> Tensor:
        ctx.save_for_backward(v, weight, key_mask)
        return ops.call("convolution_forward", y, v, weight, key_mask)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        dv, dweight = ops.call("convolution_backward", g, *ctx.saved_tensors)
        return g, dv, dweight, None


@ops.op
@tape.played
def convolution_forward(
    y: Tensor, v: Tensor, weight: Tensor, key_mask: Tensor | None
) -> list[Tensor]:
    """y and the convolution of v."""
    from longspan.attention import tiles
    from longspan.attention.convolution import triton as verbs

    mask = None if key_mask is None else key_mask.contiguous()
    return [verbs.convolve(tiles.rows(v), weight.contiguous(), mask, y=tiles.rows(y))]


@ops.fake(convolution_forward)
def _(y: Tensor, v: Tensor, weight: Tensor, key_mask: Tensor | None) -> list[Tensor]:
    return [y.new_empty(y.shape)]


@ops.op
@tape.played
def convolution_backward(
    g: Tensor, v: Tensor, weight: Tensor, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of v and of the weight."""
    from longspan.attention import tiles
    from longspan.attention.convolution import triton as verbs

    mask = None if key_mask is None else key_mask.contiguous()
    g, v = tiles.rows(g.to(v.dtype)), tiles.rows(v)  # they differ if a method was autocast
    dv = verbs.convolve(g, weight.contiguous(), mask, back=True)
    return dv, verbs.weight_gradient(g, v, weight, mask)


@ops.fake(convolution_backward)
def _(g: Tensor, v: Tensor, weight: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), weight.new_empty(weight.shape)
