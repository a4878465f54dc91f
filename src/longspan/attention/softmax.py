"""Exact softmax attention (Vaswani et al. 2017): the yardstick, quadratic in time."""

from torch import Tensor

from longspan.attention import checks
from longspan.attention.base import exact, hide, own_precision
from longspan.attention.module import Attention


@own_precision
def softmax(
    q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(scale · q kᵀ) v, through `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        q: queries (B, H, Nq, D).
        k: keys (B, H, Nk, D).
        v: values (B, H, Nk, Dv).
        key_mask: boolean (B, Nk), true = attend.
        scale: factor of the scores, 1/√D by default.

    Returns:
        (B, H, Nq, Dv) in the dtype of v.
    """
    checks.qkv(q, k, v)
    checks.key_mask(key_mask, k)
    checks.scale(scale)
    visible = None if key_mask is None else key_mask[:, None, None, :]
    return exact(q, hide(k, key_mask), hide(v, key_mask), visible, scale)


class SoftmaxAttention(Attention):
    """`softmax` as a module."""

    function = staticmethod(softmax)
