"""Sliding-window attention (Longformer, Beltagy et al. 2020): token i sees |i − j| ≤ window."""

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention import checks
from longspan.attention.base import exact, hide, own_precision
from longspan.attention.module import Attention


@own_precision
def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    window: int = 128,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention over the keys at most `window` places away: O(N · window).

    Args:
        q: queries (B, H, Nq, D). Query i stands at place i, also where Nq ≠ Nk.
        k: keys (B, H, Nk, D).
        v: values (B, H, Nk, Dv).
        key_mask: boolean (B, Nk), true = attend.
        window: places seen on each side; 128 is Longformer-257.
        scale: factor of the scores, 1/√D by default.

    Returns:
        (B, H, Nq, Dv) in the dtype of v.
    """
    checks.qkv(q, k, v)
    checks.key_mask(key_mask, k)
    checks.integer("window", window, 0)
    checks.scale(scale)
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    size = max(window, 1)
    blocks = -(-queries // size)
    # Queries in blocks of one window; block b sees the key blocks b − 1, b and b + 1.
    q = F.pad(q, (0, 0, 0, blocks * size - queries)).unflatten(2, (blocks, size))
    k, v = (_neighbourhoods(hide(x, key_mask), blocks, size) for x in (k, v))
    place = torch.arange(size, device=q.device)
    near = (torch.arange(3 * size, device=q.device) - size - place[:, None]).abs() <= window
    there = q.new_ones(1, keys, dtype=torch.bool) if key_mask is None else key_mask
    there = _neighbourhoods(there[:, None, :, None], blocks, size)[:, 0, :, None, :, 0]
    visible = (near & there).expand(batch, -1, -1, -1)  # (B, blocks, size, 3 size)
    fold = lambda x: x.transpose(1, 2).flatten(0, 1)  # noqa: E731  (B · blocks, H, tokens, D)
    y = exact(fold(q), fold(k), fold(v), visible.flatten(0, 1)[:, None], scale)
    return y.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :queries]


def _neighbourhoods(x: Tensor, blocks: int, size: int) -> Tensor:
    """(B, H, N, D) → (B, H, blocks, 3 size, D): each block between its neighbours."""
    after = (blocks + 1) * size - x.shape[2]
    return F.pad(x, (0, 0, size, after)).unfold(2, 3 * size, size).mT


class WindowAttention(Attention):
    """`window` as a module."""

    function = staticmethod(window)
