"""Rows of equal length out of a stream of documents; no token is lost, none is read twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Packed:
    """The stream cut every `width` tokens; documents keep their [SEP], and may share a row.

    Args:
        tokens: (T,) ids, each document followed by [SEP].
        width: tokens of a row.
        pad_id: fills the last row.
    """

    def __init__(self, tokens: NDArray[Any], width: int, pad_id: int) -> None:
        self.tokens, self.width, self.pad_id = tokens, width, pad_id
        self.whole = tokens[: len(tokens) // width * width].reshape(-1, width)

    def __len__(self) -> int:
        return -(-len(self.tokens) // self.width)

    def take(self, rows: Sequence[int]) -> NDArray[np.int64]:
        """(B, width) ids of these rows."""
        number = np.asarray(rows)
        inside = np.minimum(number, max(len(self.whole) - 1, 0))
        if len(self.whole):
            ids = self.whole[inside].astype(np.int64)
        else:
            ids = np.empty((len(number), self.width), np.int64)
        last = number == len(self.whole)
        if last.any():
            ids[last] = self.pad_id
            rest = self.tokens[len(self.whole) * self.width :]
            ids[last, : len(rest)] = rest
        return ids
