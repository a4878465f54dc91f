"""Window attention in plain torch, blocks of one window beside their neighbours: the specification.

output_i = Σ_j p_ij v_j over |i − j| ≤ window, p the softmax of scale · q_i·k_j over those keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention.base import exact, hide


def window(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, window: int, scale: float | None
) -> Tensor:
    """Arguments as in `longspan.window`."""
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    window = min(window, max(queries, keys))  # no key is further away
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
