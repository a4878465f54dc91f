"""Strided sparse attention (Sparse Transformer, Child et al. 2019), in both directions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention import checks
from longspan.attention.base import hide, in_chunks, merge, own_precision, partial, per_chunk
from longspan.attention.module import Attention


@own_precision
def strided(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    stride: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of token i over {j : |i − j| ≤ stride} ∪ {j : i ≡ j mod stride}.

    With the default stride ⌈√Nk⌉ every token reaches every other in two layers: O(N √N).

    Args:
        q: queries (B, H, Nq, D). Query i stands at place i, also where Nq ≠ Nk.
        k: keys (B, H, Nk, D).
        v: values (B, H, Nk, Dv).
        key_mask: boolean (B, Nk), true = attend.
        stride: distance of the far keys and reach of the near ones; ⌈√Nk⌉ by default, so give it
            where a padded batch must equal its sequences alone.
        scale: factor of the scores, 1/√D by default.

    Returns:
        (B, H, Nq, Dv) in the dtype of v.
    """
    checks.qkv(q, k, v)
    checks.key_mask(key_mask, k)
    if stride is not None:
        checks.integer("stride", stride, 1)
    checks.scale(scale)
    size = _root(k.shape[2]) if stride is None else min(stride, max(q.shape[2], k.shape[2]))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    batch, heads, queries, _ = q.shape
    keys, dtype = k.shape[2], v.dtype
    wide = torch.promote_types(dtype, torch.float32)
    rows = -(-max(queries, keys) // size)
    # Tokens as a grid of `rows` rows of `size` places: a column holds the tokens ≡ mod stride.
    grid = lambda x: F.pad(x, (0, 0, 0, rows * size - x.shape[2])).unflatten(2, (rows, size))  # noqa: E731
    q, k, v = (grid(x.to(wide)) for x in (q, hide(k, key_mask), hide(v, key_mask)))
    there = q.new_ones(1, keys, dtype=torch.bool) if key_mask is None else key_mask
    there = grid(there.expand(batch, -1)[:, None, :, None].expand(-1, heads, -1, -1))

    def near(q: Tensor, k: Tensor, v: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(3 * size, device=q.device) - size
        reach = (place - place[size : 2 * size, None]).abs() <= size
        return partial(q, k, v, reach & there.mT, scale)

    def far(q: Tensor, k: Tensor, v: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        # Keys within one row up or down are near already.
        row = torch.arange(rows, device=q.device)
        return partial(q, k, v, ((row - row[:, None]).abs() > 1) & there.mT, scale)

    parts = []
    around = [_three_rows(x).flatten(0, 2) for x in (k, v, there)]
    parts.append(in_chunks(near, per_chunk(3 * size * size), q.flatten(0, 2), *around))
    columns = [x.transpose(2, 3).flatten(0, 2) for x in (q, k, v, there)]
    parts.append(in_chunks(far, per_chunk(rows * rows), *columns))
    shapes = (batch, heads, rows, size), (batch, heads, size, rows)
    local, column = (
        [x.unflatten(0, s[:3]) for x in part] for part, s in zip(parts, shapes, strict=True)
    )
    y = merge([(local[0], local[1]), (column[0].transpose(2, 3), column[1].transpose(2, 3))])
    return y.flatten(2, 3)[:, :, :queries].to(dtype)


def _root(number: int) -> int:
    """⌈√number⌉ by comparisons alone, which a compiler can make of a length it does not know."""
    low, high = 0, 1
    while high * high < number:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle * middle < number else (low, middle)
    return high


def _three_rows(x: Tensor) -> Tensor:
    """(B, H, rows, size, D) → (B, H, rows, 3 size, D): each row between its neighbours."""
    rows = x.shape[2]
    padded = F.pad(x, (0, 0, 0, 0, 1, 1))
    return torch.cat([padded[:, :, i : i + rows] for i in range(3)], dim=3)


class StridedAttention(Attention):
    """`strided` as a module."""

    function = staticmethod(strided)
