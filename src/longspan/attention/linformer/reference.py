"""Linformer as the paper writes it, in plain torch: the specification of the kernels.

output = softmax(s · q (E k)ᵀ) (F v)     E, F (k, N), or (H, k, N) for one a head
"""

import torch
from torch import Tensor

from longspan.attention.base import exact, hide


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
    dtype = v.dtype
    if v.device.type == "cpu":  # few CPUs multiply half precision faster, some far slower
        q, k, v = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q, k, v))
    short_k = key_projection.to(k.dtype) @ hide(k, key_mask)
    short_v = value_projection.to(v.dtype) @ hide(v, key_mask)
    return exact(q, short_k, short_v, scale=scale).to(dtype)
