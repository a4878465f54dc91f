"""The exact expectation of YOSO on NVIDIA GPUs: both passes as torch.library ops."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import dispatch, ops, tape
from longspan.attention.base import hide

MAX_CHANNELS = 256
NARROW = 32


def why_not(device: torch.device) -> list[str]:
    """Why the kernels cannot run on a device; empty where they can."""
    return dispatch.why_not_cuda("yoso_expectation", device)


def why_not_these(q: Tensor, v: Tensor) -> list[str]:
    """Why the kernels cannot run on these tensors; empty where they can."""
    return dispatch.why_not_these("yoso_expectation", q, v, MAX_CHANNELS)


def yoso_expectation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    hash_bits: int,
    gradient: str,
    normalize: bool,
) -> Tensor:
    """The limit of many hashes; arguments as in `longspan.yoso_expectation`."""
    if q.shape[0] == 0:
        return dispatch.nothing(q, k, v)
    # A hidden key is zero and so is its value: no sum over keys needs a mask.
    k, v = hide(k, key_mask), hide(v, key_mask)
    if dispatch.learns(q, k, v):
        return _Fused.apply(q, k, v, hash_bits, gradient == "true", normalize)
    return ops.call("yoso_expectation_forward", q, k, v, hash_bits, normalize)[0]


class _Fused(torch.autograd.Function):
    """The two ops as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, hash_bits: int, true: bool, normalize: bool
    ) -> Tensor:
        y, *saved = ops.call("yoso_expectation_forward", q, k, v, hash_bits, normalize)
        ctx.save_for_backward(q, k, v, y, *saved)
        ctx.options = hash_bits, true, normalize
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        grads = ops.call("yoso_expectation_backward", g, *ctx.saved_tensors, *ctx.options)
        return *grads, None, None, None


@ops.op
@tape.played
def yoso_expectation_forward(
    q: Tensor, k: Tensor, v: Tensor, hash_bits: int, normalize: bool
) -> tuple[Tensor, Tensor]:
    """The output, and 1/norm of its rows."""
    from longspan.attention import tiles
    from longspan.attention.yoso import expectation_triton as verbs

    dtype = v.dtype
    wide = torch.float32 if _is_narrow(q) else dtype
    q, k, v = (tiles.rows(x.to(wide)) for x in (q, k, v))
    precision = tiles.arithmetic(dtype)
    y, inverse = verbs.sum_values(q, verbs.unit_rows(k), v, hash_bits, normalize, precision)
    return y.to(dtype), inverse


def _is_narrow(q: Tensor) -> bool:
    """Whether bfloat16 rows have so few channels that their rounding does not average out."""
    return q.dtype == torch.bfloat16 and q.shape[3] < NARROW


@ops.fake(yoso_expectation_forward)
def _(q: Tensor, k: Tensor, v: Tensor, hash_bits: int, normalize: bool) -> tuple[Tensor, Tensor]:
    y = v.new_empty((*q.shape[:3], v.shape[3]))
    return y, v.new_empty(q.shape[:3], dtype=torch.float32)


@ops.op
@tape.played
def yoso_expectation_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    y_inverse: Tensor,
    hash_bits: int,
    true: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The surrogate or true gradients of q and k, and the gradient of v."""
    from longspan.attention import tiles
    from longspan.attention.yoso import expectation_triton as verbs

    dtype = v.dtype
    # float16 has not the range for gradients divided by norms.
    wide = torch.float32 if dtype == torch.float16 or _is_narrow(q) else dtype
    q, k, v = (tiles.rows(x.to(wide)) for x in (q, k, v))
    g, y = g.contiguous().to(wide), y.to(wide)
    grads = verbs.gradients(
        g, q, k, v, y, y_inverse, hash_bits, true, normalize, tiles.arithmetic(dtype)
    )
    dq, dk, dv = (x.to(dtype) for x in grads)
    return dq, dk, dv


@ops.fake(yoso_expectation_backward)
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
