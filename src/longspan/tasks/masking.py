"""Masked language modelling: which tokens are hidden, and behind what.

Every draw is a function of (seed, epoch, row, place), so that a row is masked alike whatever
process reads it, and anew in every epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IGNORED = -100  # the label of a place that is not to be predicted
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Masking:
    """Hide a share of the tokens: 80 % behind [MASK], 10 % behind a random token, 10 % not at all.

    Args:
        mask_id: the id of [MASK].
        ordinary: ids that may be hidden and drawn at random: all but the special ones.
        pad_id: of what fills rows, and is not counted.
        share: of the tokens of a row, special ones counted, so that full rows hide equally many.
        continues: (V,) whether an id continues the word before it; hides words whole if given.
        seed: of all draws.
    """

    mask_id: int
    pad_id: int
    ordinary: Ids
    share: float = 0.15
    continues: NDArray[np.bool_] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what nothing below checks."""
        if not 0 < self.share < 1:
            raise ValueError(f"share must be between 0 and 1, got {self.share}")

    def places(self, length: int) -> int:
        """How many places of a row of `length` tokens are predicted, at most."""
        return max(1, round(self.share * length))

    def apply(self, ids: Ids, rows: Ids, epoch: int) -> tuple[Ids, Ids, Ids]:
        """Mask ids (B, N): what the model reads (B, N), and (B, M) places and labels.

        Unused places are 0 with the label −100.
        """
        batch, length = ids.shape
        draws = uniform(self.seed, epoch, rows, 3 * length)
        order, kind, other = draws.reshape(batch, 3, length).transpose(1, 0, 2)  # (B, N) each
        hidable = np.isin(ids, self.ordinary)
        most = self.places(length)
        count = np.rint(self.share * (ids != self.pad_id).sum(1)).astype(np.int64)
        count = np.minimum(np.clip(count, 1, most), hidable.sum(1))
        if self.continues is None:
            chosen = _smallest(np.where(hidable, order, 2.0), count)
        else:
            chosen = self._whole_words(ids, hidable, order, count)
        read = np.where(chosen & (kind < 0.8), self.mask_id, ids)
        drawn = self.ordinary[(other * len(self.ordinary)).astype(np.int64)]
        read = np.where(chosen & (kind >= 0.8) & (kind < 0.9), drawn, read)
        places = np.argsort(~chosen, axis=1, kind="stable")[:, :most]  # the chosen, in order
        labels = np.take_along_axis(np.where(chosen, ids, IGNORED), places, axis=1)
        return read, np.where(labels == IGNORED, 0, places), labels

    def _whole_words(
        self, ids: Ids, hidable: NDArray[np.bool_], order: NDArray[np.float64], count: Ids
    ) -> NDArray[np.bool_]:
        """Words in random order, as many as fit into `count`; the first one cut if it must."""
        assert self.continues is not None
        begins = ~(self.continues[ids] & hidable)
        begins[:, 1:] |= ~hidable[:, :-1]  # what follows a special token begins a word
        begins[:, 0] = True
        word = np.cumsum(begins, axis=1) - 1  # (B, N)
        starts = np.argsort(~begins, axis=1, kind="stable")  # place of word w, at w
        rank = np.take_along_axis(order, np.take_along_axis(starts, word, axis=1), axis=1)
        rank = np.where(hidable, rank, 2.0)
        places = np.argsort(rank, axis=1, kind="stable")
        words = np.take_along_axis(word, places, axis=1)  # words side by side, in random order
        position = np.arange(ids.shape[1])[None]
        last = np.maximum(count - 1, 0)[:, None]
        following = np.minimum(last + 1, ids.shape[1] - 1)
        cut = np.take_along_axis(words, last, axis=1)
        is_cut = (np.take_along_axis(words, following, axis=1) == cut) & (following > last)
        is_cut &= cut != words[:, :1]
        taken = (position < count[:, None]) & ~(is_cut & (words == cut))
        chosen = np.zeros_like(hidable)
        np.put_along_axis(chosen, places, taken, axis=1)
        return chosen & hidable


def uniform(seed: int, epoch: int, rows: Ids, count: int) -> NDArray[np.float64]:
    """Return (B, count) numbers in [0, 1), each a function of (seed, epoch, row, place)."""
    with np.errstate(over="ignore"):
        x = _mix(np.uint64(seed) + np.uint64(0x9E3779B97F4A7C15))
        x = _mix(x ^ np.uint64(epoch))
        x = _mix(x ^ np.asarray(rows, np.uint64))[:, None]
        x = _mix(x ^ np.arange(count, dtype=np.uint64))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """Scramble 64-bit integers one to one (the finaliser of SplitMix64)."""
    x = np.asarray(x, np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _smallest(values: NDArray[np.float64], count: Ids) -> NDArray[np.bool_]:
    """Mark the `count` smallest of every row."""
    ranks = np.empty(values.shape, np.int64)
    order = np.argsort(values, axis=1)
    np.put_along_axis(ranks, order, np.arange(values.shape[1])[None], axis=1)
    return ranks < count[:, None]
