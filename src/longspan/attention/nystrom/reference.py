"""Nyström attention as the paper writes it, in plain torch: the specification of the kernels.

    F = softmax(s · q k̃ᵀ)   A = softmax(s · q̃ k̃ᵀ)   B = softmax(s · q̃ kᵀ)   output = F (A⁺ (B v))

F and B are only ever multiplied, so neither exists: both products are cross-attentions.
"""

import torch
from torch import Tensor

from longspan.attention.base import exact, hide, segment_means


def nystrom(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    init: str,
    scale: float | None,
) -> Tensor:
    """Arguments as in `longspan.nystrom`."""
    result, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    if v.device.type == "cpu":  # few CPUs multiply half precision faster, some far slower
        q, k, v = (x.to(wide) for x in (q, k, v))
    dtype = v.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    query_mask = key_mask if q.shape[2] == k.shape[2] else None
    k, v = hide(k, key_mask), hide(v, key_mask)
    q_means, q_sizes = segment_means(hide(q, query_mask).to(wide), query_mask, num_landmarks)
    k_means, k_sizes = segment_means(k.to(wide), key_mask, num_landmarks)
    visible = None if key_mask is None else key_mask[:, None, None, :]
    bv = exact(q_means.to(dtype), k, v, visible, scale).to(wide)
    scores = q_means @ k_means.mT * scale
    if key_mask is None and min(q.shape[2], k.shape[2]) > num_landmarks:  # none is empty
        values = pseudo_inverse(scores.softmax(-1), num_iterations, init) @ bv
        return exact(q, k_means.to(dtype), values.to(dtype), scale=scale).to(result)

    # An empty landmark has a zero row or column in A, hence in A⁺, and no part in the result.
    q_there, k_there = (sizes[:, None, :] > 0 for sizes in (q_sizes, k_sizes))
    a = softmax_over(scores, k_there[:, :, None, :]) * q_there[..., None]
    values = pseudo_inverse(a, num_iterations, init) @ bv

    # With a landmark for every key, F v is exact attention already.
    v_means, _ = segment_means(v.to(wide), key_mask, num_landmarks)
    alone = k_sizes.sum(-1) <= num_landmarks
    values = torch.where(alone[:, None, None, None], v_means, values)
    y = exact(q, k_means.to(dtype), values.to(dtype), k_there[:, :, None, :], scale)
    return y.to(result)


def softmax_over(scores: Tensor, visible: Tensor) -> Tensor:
    """Row softmax over the visible columns, zeros elsewhere and where nothing is visible."""
    blind = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~(visible | blind), -torch.inf)
    return scores.softmax(-1).masked_fill(~visible, 0)


def pseudo_inverse(a: Tensor, num_iterations: int, init: str) -> Tensor:
    """Z ← ¼ Z (13 I − A Z (15 I − A Z (7 I − A Z))), from Aᵀ / (‖A‖₁ ‖A‖∞)."""
    columns, rows = a.sum(-2, keepdim=True), a.sum(-1, keepdim=True)
    norm = columns.amax(-1, keepdim=True) * rows.amax(-2, keepdim=True)
    if init == "original":
        norm = norm.amax()
    z = (a.mT / norm.masked_fill(norm == 0, 1)).flatten(0, 1)
    shape, a = a.mT.shape, a.flatten(0, 1)
    eye = torch.eye(a.shape[-2], dtype=a.dtype, device=a.device)
    seven, thirteen, fifteen = 7 * eye, 13 * eye, 15 * eye
    for _ in range(num_iterations):
        x = torch.bmm(a, z)
        y = torch.baddbmm(fifteen, x, seven - x, alpha=-1)
        y = torch.baddbmm(thirteen, x, y, alpha=-1)
        z = torch.baddbmm(eye, z, y, beta=0, alpha=0.25)
    return z.view(shape)
