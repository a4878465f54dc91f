"""What is timed beside the methods and is none: by the name that rows have as their method."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import longspan


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Exact attention with its N × N weights in memory, as the papers timed it."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def expectation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`yoso_expectation` as Hugging Face computes it: N² weights, kept for the backward."""
    return F.normalize(
        _Expectation.apply(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v), dim=-1
    )


def frozen(
    q: Tensor, k: Tensor, v: Tensor, key_projection: Tensor, value_projection: Tensor
) -> Tensor:
    """Linformer whose projections need no gradient."""
    return longspan.linformer(q, k, v, key_projection.detach(), value_projection.detach())


BASELINES: dict[str, Callable[..., Tensor]] = {
    "eager": eager,
    "yoso_expectation eager": expectation,
    "linformer frozen": frozen,
}


class _Expectation(torch.autograd.Function):
    bits = 8

    @staticmethod
    def forward(ctx, q, k, v):  # type: ignore[no-untyped-def]
        cosine = (q @ k.mT).clamp(-1, 1)
        weight = (1 - cosine.acos() / math.pi) ** _Expectation.bits
        ctx.save_for_backward(q, k, v, weight)
        return weight @ v

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        q, k, v, weight = ctx.saved_tensors
        w = _Expectation.bits / 2 * weight * (g @ v.mT)
        return w @ k, w.mT @ q, weight.mT @ g
