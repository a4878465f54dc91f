"""Where the segments lie whose means are landmarks, for the kernels."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Where the segments of queries or keys lie; all None where they are even and all full."""

    mask: Tensor | None = None  # (B, N)
    bounds: tuple[Tensor, Tensor, Tensor] | None = None  # first, last + 1 (B, F); length (B,)
    there: Tensor | None = None  # (B, F), which hold a token
    segment: Tensor | None = None  # (B, N) int32, −1 where masked
    sizes: Tensor | None = None  # (B, F)

    @property
    def cut(self) -> tuple[Tensor, ...]:
        """What `segment_means` is told of them; nothing of even ones."""
        return () if self.mask is None or self.bounds is None else (self.mask, *self.bounds)


def segments(mask: Tensor | None, batch: int, tokens: int, few: int, device: Any) -> Segments:
    """As `base.segment_means` cuts them, without a host's look at them."""
    from longspan.attention.nystrom import triton as verbs

    mask, first, last, length, there, sizes, segment = verbs.cut(mask, batch, tokens, few, device)
    return Segments(mask, (first, last, length), there, segment, sizes)


def both_segments(q: Tensor, k: Tensor, key_mask: Tensor | None, few: int) -> list[Segments]:
    """Of queries and keys: uneven where a mask hides keys or there are too few tokens."""
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    if key_mask is None and queries >= few and keys > few:  # else exact attention
        return [Segments(), Segments()]
    by_key = segments(key_mask, batch, keys, few, k.device)
    if queries == keys:  # one sequence: masked places do not enter the queries' landmarks either
        return [by_key, by_key]
    return [segments(None, batch, queries, few, q.device), by_key]


def lengths(cut: list[Segments]) -> tuple[Tensor, Tensor] | None:
    """Valid queries and keys (B,) where segments are uneven."""
    if cut[0].bounds is None or cut[1].bounds is None:
        return None
    return cut[0].bounds[2], cut[1].bounds[2]
