"""What is left to torch where there are too many landmarks for one program of a kernel."""

from typing import Any

import torch
from torch import Tensor

from longspan.attention.nystrom import reference
from longspan.attention.nystrom.segments import Segments


def sizes(cut: Segments, tokens: int, few: int, device: Any) -> Tensor | int:
    """Tokens of each segment, at least one, against (B, H, F, D)."""
    if cut.sizes is not None:
        return cut.sizes.clamp(min=1)[:, None, :, None]
    if tokens % few == 0:
        return tokens // few
    edges = (torch.arange(few + 1, device=device) * tokens + few - 1) // few
    return edges.diff()[:, None]


def softmax(q_means: Tensor, k_means: Tensor, cut: list[Segments], scale: float) -> Tensor:
    """A of every head, where there are too many landmarks for one program."""
    scores = q_means @ k_means.mT * scale
    q_there, k_there = cut[0].there, cut[1].there
    if q_there is None or k_there is None:
        return scores.softmax(-1)
    return reference.softmax_over(scores, k_there[:, None, None]) * q_there[:, None, :, None]


def own_values(w: Tensor, v: Tensor, by_key: Segments) -> Tensor:
    """With no more keys than landmarks, the values themselves."""
    if by_key.bounds is None or by_key.there is None:
        return w
    first, _, length = by_key.bounds
    alone = (length <= w.shape[2])[:, None, None, None]
    keep = by_key.there & alone[:, 0, :, 0]
    index = torch.where(keep, first, 0)[:, None, :, None].expand_as(w)
    return torch.where(alone, v.gather(2, index).float().masked_fill(~keep[:, None, :, None], 0), w)


def solve_backward(
    q_means: Tensor,
    k_means: Tensor,
    bv: Tensor,
    dw: Tensor,
    dk_means: Tensor,
    cut: list[Segments],
    key_sizes: Tensor | int,
    num_iterations: int,
    original: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of B v, q̃, k̃ (over its segment's size) and v's own, by torch's products."""
    table_v = torch.zeros_like(dw)
    if cut[1].bounds is not None:
        alone = (cut[1].bounds[2] <= dw.shape[2])[:, None, None, None]
        table_v, dw = torch.where(alone, dw, 0), torch.where(alone, 0, dw)
    a = softmax(q_means, k_means, cut, scale)
    columns, rows = a.sum(-2, keepdim=True), a.sum(-1, keepdim=True)
    norm = columns.amax(-1, keepdim=True) * rows.amax(-2, keepdim=True)
    start = norm.amax() if original else norm
    start = start.masked_fill(start == 0, 1)
    eye = torch.eye(a.shape[-1], device=a.device)
    kept = [a.mT / start]
    for _ in range(num_iterations):
        x = a @ kept[-1]
        kept.append(0.25 * kept[-1] @ (13 * eye - x @ (15 * eye - x @ (7 * eye - x))))
    dbv = kept.pop().mT @ dw
    dz, da = dw @ bv.mT, torch.zeros_like(a)
    for z in reversed(kept):
        x = a @ z
        m2 = 15 * eye - 7 * x + x @ x
        dm3 = 0.25 * z.mT @ dz
        dz = 0.25 * dz @ (13 * eye - x @ m2).mT
        dm2 = -x.mT @ dm3
        dx = dm2 @ x.mT + x.mT @ dm2 - 7 * dm2 - dm3 @ m2.mT
        da += dx @ z.mT
        dz += a.mT @ dx
    da += dz.mT / start
    dnorm = -(dz.mT * a).sum((-2, -1), keepdim=True) / start.square()
    if original:
        largest = norm == norm.amax()
        dnorm = torch.where(largest, dnorm.sum() / largest.sum(), 0)
    # A row's sum is 1 whatever its scores: only the largest column of the norm has a gradient.
    highest = (columns == columns.amax(-1, keepdim=True)).float()
    da += highest / highest.sum(-1, keepdim=True) * dnorm * rows.amax(-2, keepdim=True)
    s = a * (da - (a * da).sum(-1, keepdim=True)) * scale
    return dbv, s @ k_means, (dk_means + s.mT @ q_means) / key_sizes, table_v
