"""What the methods share: the shape legend, masks, exact attention over visible keys.

Shapes, everywhere:

    B  batch        N  tokens (Nq queries, Nk keys)     q (B, H, Nq, D)    k (B, H, Nk, D)
    H  heads        D  channels of a head (Dv: values)  v (B, H, Nk, Dv)   output (B, H, Nq, Dv)

`key_mask` is boolean (B, Nk), true = attend. Contents of masked keys never matter, NaN
included, and a query that sees no key gives zeros and no gradient.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Elements of the temporaries a reference makes in one step: few enough to stay in a CPU's caches
# (past 32 MB every one of them costs fresh pages), enough to fill a GPU.
CHUNK = 1 << 21


def per_chunk(elements: int) -> int:
    """How many pieces of so many elements fit into a chunk: at least one."""
    return max(1, CHUNK // max(1, elements))


P = ParamSpec("P")


def own_precision(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Let a method choose its precision: autocast would halve the sums it keeps in float32."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        q = args[0] if args else kwargs.get("q")
        # Where q is no tensor, the method's own check says what is wrong.
        if not isinstance(q, Tensor) or not torch.is_autocast_enabled(q.device.type):
            return function(*args, **kwargs)
        with torch.autocast(q.device.type, enabled=False):
            return function(*args, **kwargs)

    return run


def hide(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Zero the tokens that a (B, N) mask hides in x (B, H, N, D), whatever they hold."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0)


def unit(x: Tensor) -> Tensor:
    """Scale rows to length one; a zero row stays zero and passes no gradient.

    `F.normalize` multiplies the gradient of a zero row by 1e12; that of rsqrt is a cube, which
    overflows where the row's does not.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    zero = norm == 0
    return (x / norm.masked_fill(zero, 1)).masked_fill(zero, 0)


def exact(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """softmax(scale · q kᵀ) v over the visible keys, through torch's fused kernels.

    `visible` broadcasts to (B, H, Nq, Nk). What is hidden from every query must hold no NaN.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    channels = v.shape[-1]
    # Fused kernels want q, k and v equally wide; zero columns change no score.
    missing = channels - q.shape[-1]
    if missing > 0:
        q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
    elif missing < 0:
        v = F.pad(v, (0, -missing))
    if visible is None:
        y = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return y[..., :channels] if missing < 0 else y  # the gradient of a part is a copy
    blind = ~visible.any(-1, keepdim=True)
    # A row without any key would be NaN in some kernels: show it all, then drop the result.
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | blind, scale=scale)
    return y[..., :channels].masked_fill(blind, 0)


def partial(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Exact attention over some of the keys, and the log-sum-exp that `merge` weighs it by.

    q (…, n, D), k and v (…, k, D), visible broadcast to (…, n, k) → (…, n, Dv), (…, n, 1).
    """
    blind = ~visible.any(-1, keepdim=True)
    scores = (q @ k.mT * scale).masked_fill(~(visible | blind), -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    y = (scores - total).exp() @ v
    # Finite, not −∞: two blind parts must merge into zeros, and NaN must not come back as gradient.
    return y.masked_fill(blind, 0), total.masked_fill(blind, torch.finfo(q.dtype).min / 4)


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Join softmaxes over disjoint sets of keys into the softmax over their union."""
    weights = torch.stack([total for _, total in parts]).softmax(0)
    return sum(
        (w * y for w, (y, _) in zip(weights, parts, strict=True)), start=weights.new_zeros(())
    )


def in_chunks(function: Callable, rows: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Apply `function` to `rows` rows of the first dimension at a time, and join the results.

    Each chunk is recomputed in the backward, so no more than one chunk's temporaries exist.
    """
    chunks = zip(*(x.split(rows) for x in tensors), strict=True)
    results = [
        checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False)
        for chunk in chunks
    ]
    return tuple(torch.cat(column) for column in zip(*results, strict=True))


def segment_means(x: Tensor, key_mask: Tensor | None, num_segments: int) -> tuple[Tensor, Tensor]:
    """Average each sequence over `num_segments` runs of its own valid tokens.

    With L valid tokens, the i-th of them belongs to segment ⌊i · num_segments / L⌋, so sizes
    differ by at most one, and neither padding nor its length changes anything.
    x (B, H, N, D) → means (B, H, num_segments, D), sizes (B, num_segments); empty segments are 0.
    """
    batch, heads, tokens, channels = x.shape
    if key_mask is None and tokens % num_segments == 0:
        size = tokens // num_segments
        sizes = torch.full((batch, num_segments), size, device=x.device)
        # Not mean(), whose gradient is divided token by token.
        return x.unflatten(2, (num_segments, -1)).sum(3) / size, sizes
    if key_mask is None:
        key_mask = x.new_ones(batch, tokens, dtype=torch.bool)
    length = key_mask.sum(-1, keepdim=True)  # (B, 1)
    edges = torch.arange(num_segments + 1, device=x.device) * length  # (B, segments + 1)
    edges = (edges + num_segments - 1) // num_segments
    first, sizes = edges[:, :-1], edges.diff(dim=-1)
    step = torch.arange(-(-tokens // num_segments), device=x.device)
    inside = step < sizes[..., None]  # (B, segments, longest)
    order = (~key_mask).to(torch.int8).argsort(dim=-1, stable=True)  # valid tokens first, in place
    rank = (first[..., None] + step).clamp(max=tokens - 1).flatten(1)
    token = order.gather(1, rank)[:, None, :, None].expand(-1, heads, -1, channels)
    member = x.gather(2, token).unflatten(2, inside.shape[1:])
    total = member.masked_fill(~inside[:, None, ..., None], 0).sum(3)
    return total / sizes.clamp(min=1)[:, None, :, None], sizes
