"""Examples of a split as batches: token ids and masks, made on the device where the bytes are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.tasks.lra.splits import Split


class ByteExamples:
    """The examples of a split (`longspan.tasks.base.Examples`).

    Args:
        split: on the device where batches are wanted.
        length: bytes of a document that are read.
        padded: tokens of a document, padding included.
        zero_is_padding: take bytes as ids and 0 for padding, as published code does with pixels.
            Otherwise a byte b has the id b + 1, and 0 is padding and nothing else.
    """

    def __init__(
        self, split: Split, *, length: int, padded: int, zero_is_padding: bool = False
    ) -> None:
        self.split, self.length, self.padded = split, length, padded
        self.zero_is_padding = zero_is_padding
        self.place = torch.arange(padded, device=split.data.device)
        # Without padding there is nothing to mask, and methods are faster without a mask.
        shortest = min(length, int(split.lengths.min()))
        self.masked = zero_is_padding or shortest < padded

    def __len__(self) -> int:
        return len(self.split)

    def mean_length(self) -> float:
        """Tokens of an example, padding not counted."""
        tokens = self.split.lengths.clamp(max=self.length)[self.split.rows].sum(1)
        return float(tokens.float().mean())

    def batch(self, indices: Sequence[int] | Tensor, epoch: int = 0) -> dict[str, Tensor]:
        """input_ids (B, N), attention_mask unless all is valid, labels (B,); for pairs `pair_…`."""
        device = self.split.data.device
        chosen = torch.as_tensor(indices, device=device)
        rows = self.split.rows[chosen]
        batch: dict[str, Tensor] = {"labels": self.split.labels[chosen]}
        for column, prefix in zip(rows.unbind(1), ("", "pair_"), strict=False):
            ids, mask = self.tokens(column)
            batch[f"{prefix}input_ids"] = ids
            if self.masked:
                batch[f"{prefix}attention_mask"] = mask
        return batch

    def tokens(self, documents: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and mask (B, N) of some documents (B,)."""
        lengths = self.split.lengths[documents].clamp(max=self.length)
        mask = self.place < lengths[:, None]
        where = (self.split.starts[documents, None] + self.place) * mask
        ids = self.split.data[where].int()
        if self.zero_is_padding:
            ids = ids * mask
            return ids, ids != 0
        return (ids + 1) * mask, mask
