"""One function, by torch or fused."""

import torch.nn.functional as F
from torch import Tensor

from longspan.attention.base import hide
from longspan.attention.convolution import kernels


def add_convolution(
    y: Tensor, v: Tensor, weight: Tensor, key_mask: Tensor | None, impl: str = "auto"
) -> Tensor:
    """y (B, H, N, Dv) and the convolution of v (B, H, N, Dv) with weight (H, 1, K, 1)."""
    fused = impl != "reference" and not kernels.why_not(v)
    return (kernels.fused if fused else reference)(y, v, weight, key_mask)


def reference(y: Tensor, v: Tensor, weight: Tensor, key_mask: Tensor | None) -> Tensor:
    """As torch computes it."""
    heads, _, size, _ = weight.shape
    return y + F.conv2d(hide(v, key_mask), weight, padding=(size // 2, 0), groups=heads)
