"""Examples of a split as batches: token ids and masks, made on the device where the bytes are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longspan.tasks.lra.splits import Split


class ByteExamples:
    """The examples of a split (`longspan.tasks.base.Examples`).

    Args:
        split: on the device where batches are wanted.
        length: bytes of a document that are read.
        padded: tokens of a document, padding included.
        paddings: how many padded lengths there are: a batch is padded to the shortest that holds
            it, of `padded` and its equal parts. One pads every batch alike.
        zero_is_padding: take bytes as ids and 0 for padding, as published code does with pixels.
            Otherwise a byte b has the id b + 1, and 0 is padding and nothing else.
    """

    def __init__(
        self,
        split: Split,
        *,
        length: int,
        padded: int,
        paddings: int = 1,
        zero_is_padding: bool = False,
    ) -> None:
        self.split, self.length, self.padded = split, length, padded
        self.step = -(-padded // paddings)
        self.zero_is_padding = zero_is_padding
        self.place = torch.arange(padded, device=split.data.device)
        tokens = split.lengths.clamp(max=length)[split.rows]  # (examples, k)
        self.tokens = float(tokens.sum(1).float().mean())  # of an example, padding not counted
        # Kept where batches are planned, so that nothing waits for the device.
        self.longest = tokens.amax(1).cpu().numpy()
        # Without padding there is nothing to mask, and methods are faster without a mask.
        self.masked = zero_is_padding or bool((self.longest < padded).any())

    def __len__(self) -> int:
        return len(self.split)

    def batch(self, indices: Sequence[int] | Tensor, epoch: int = 0) -> dict[str, Tensor]:
        """input_ids (B, N), attention_mask unless all is valid, labels (B,); for pairs `pair_…`."""
        device = self.split.data.device
        most = max(1, int(self.longest[np.asarray(indices)].max()))
        place = self.place[: -(-most // self.step) * self.step]
        # Not waiting for the copy, the host is a step ahead of the device.
        chosen = torch.as_tensor(indices).to(device, non_blocking=True)
        rows = self.split.rows[chosen]
        batch: dict[str, Tensor] = {"labels": self.split.labels[chosen]}
        for column, prefix in zip(rows.unbind(1), ("", "pair_"), strict=False):
            ids, mask = self._read(column, place)
            batch[f"{prefix}input_ids"] = ids
            if self.masked:
                batch[f"{prefix}attention_mask"] = mask
        return batch

    def _read(self, documents: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and mask (B, N) of some documents (B,), at so many places (N,)."""
        lengths = self.split.lengths[documents].clamp(max=self.length)
        mask = place < lengths[:, None]
        where = (self.split.starts[documents, None] + place) * mask
        ids = self.split.data[where].int()
        if self.zero_is_padding:
            ids = ids * mask
            return ids, ids != 0
        return (ids + 1) * mask, mask
