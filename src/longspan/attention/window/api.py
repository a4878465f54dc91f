"""The public function of window attention: check, choose, call."""

import torch
from torch import Tensor

from longspan.attention import checks, dispatch
from longspan.attention.base import own_precision
from longspan.attention.module import Attention
from longspan.attention.window import kernels, reference


def why_not_fused(device: torch.device) -> list[str]:
    """Why `impl="fused"` cannot run on a device; empty where it can."""
    return kernels.why_not(device)


@own_precision
def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    window: int = 128,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Softmax attention over the keys at most `window` places away: O(N · window).

    Args:
        q: queries (B, H, Nq, D). Query i stands at place i, also where Nq ≠ Nk.
        k: keys (B, H, Nk, D).
        v: values (B, H, Nk, Dv).
        key_mask: boolean (B, Nk), true = attend.
        window: places seen on each side; 128 is Longformer-257.
        scale: factor of the scores, 1/√D by default.
        impl: "auto", "fused" or "reference".

    Returns:
        (B, H, Nq, Dv) in the dtype of v.
    """
    checks.qkv(q, k, v)
    checks.key_mask(key_mask, k)
    checks.integer("window", window, 0)
    checks.scale(scale)
    reasons = why_not_fused(q.device) + kernels.why_not_these(q, v)
    run = dispatch.select(impl, reference=reference.window, fused=kernels.window, reasons=reasons)
    return run(q, k, v, key_mask, window, scale)


class WindowAttention(Attention):
    """`window` as a module."""

    function = staticmethod(window)
