"""Masked language modelling on packed documents, alone or with the order of two segments."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from longspan.models import LongspanForMaskedLM, LongspanForPreTraining
from longspan.tasks import corpus
from longspan.tasks import tokenizer as tokenizers
from longspan.tasks.base import Batch, Data, Task
from longspan.tasks.masking import IGNORED, Masking, uniform
from longspan.tasks.packing import Packed

EVALUATION_SEED = 2**32  # masks of the evaluation are the same for every run
SHORTEST = 512  # of the lengths that held-out documents are read at


class MaskedRows:
    """[CLS] and packed tokens, some masked anew each epoch."""

    def __init__(self, tokens: NDArray[Any], length: int, tokenizer: Any, masking: Masking) -> None:
        self.length, self.tokenizer, self.masking = length, tokenizer, masking
        self.packed = Packed(tokens, length - 1, tokenizer.pad_token_id)

    def __len__(self) -> int:
        return len(self.packed)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """`input_ids` (B, N), and (B, M) `masked_positions` and `labels`; masks if short."""
        ids = self.packed.take(indices)
        first = np.full((len(ids), 1), self.tokenizer.cls_token_id)
        return self._masked(np.concatenate([first, ids], axis=1), indices, epoch)

    def _masked(self, ids: NDArray[np.int64], indices: Sequence[int], epoch: int) -> Batch:
        read, places, labels = self.masking.apply(ids, np.asarray(indices), epoch)
        batch = {"input_ids": read, "masked_positions": places, "labels": labels}
        visible = ids != self.tokenizer.pad_token_id
        if not visible.all():
            batch["attention_mask"] = visible
        return {name: torch.from_numpy(array) for name, array in batch.items()}


class OrderedRows(MaskedRows):
    """[CLS] A [SEP] B [SEP]: two neighbouring segments, half of the time in the wrong order.

    The cut is the sentence's end that follows a random place in the middle half.
    """

    def __init__(self, tokens: NDArray[Any], length: int, tokenizer: Any, masking: Masking) -> None:
        super().__init__(tokens, length, tokenizer, masking)
        self.packed = Packed(tokens, length - 3, tokenizer.pad_token_id)
        self.ends = np.append(tokenizers.sentence_ends(tokenizer), tokenizer.sep_token_id)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """As `MaskedRows`, with `token_type_ids` (B, N) and `sentence_order_label` (B,)."""
        pad, cls, sep = (getattr(self.tokenizer, f"{n}_token_id") for n in ("pad", "cls", "sep"))
        draws = uniform(self.masking.seed + 1, epoch, np.asarray(indices), 2)
        rows = np.full((len(indices), self.length), pad, np.int64)
        types = np.zeros_like(rows)
        swapped = (draws[:, 1] < 0.5).astype(np.int64)
        for row, type_, ids, (where, _), swap in zip(
            rows, types, self.packed.take(indices), draws, swapped, strict=True
        ):
            ids = ids[ids != pad]
            cut = max(1, int(len(ids) * (0.25 + 0.5 * where)))
            ends = np.flatnonzero(np.isin(ids[cut - 1 : -1], self.ends))
            cut += int(ends[0]) if len(ends) else 0
            first, second = (ids[cut:], ids[:cut]) if swap else (ids[:cut], ids[cut:])
            joined = np.concatenate([[cls], first, [sep], second, [sep]])
            row[: len(joined)] = joined
            type_[len(first) + 2 : len(joined)] = 1
        batch = self._masked(rows, indices, epoch)
        batch["token_type_ids"] = torch.from_numpy(types)
        batch["sentence_order_label"] = torch.from_numpy(swapped)
        return batch


def load(
    rows: type[MaskedRows],
    data_dir: Path,
    *,
    length: int,
    device: torch.device,
    tokenizer: str | None = None,
    vocab_size: int = 16_384,
    column: str = "text",
    mask_share: float = 0.15,
    whole_word: bool = False,
    evaluation_rows: int = 0,
    verify: bool = True,
) -> Data:
    """Packed rows of a folder of text, or of tokens that `longspan tokenize` made.

    Held-out documents are read at every length from 512 on: the first `evaluation_rows` rows of
    `length` tokens, 0 for all.
    """
    folder = corpus.prepared(data_dir, tokenizer=tokenizer, vocab_size=vocab_size, column=column)
    words = tokenizers.load(folder)
    continues = tokenizers.continues(words) if whole_word else None

    def split(name: str, at: int, seed: int) -> MaskedRows:
        special = words.mask_token_id, words.pad_token_id
        masking = Masking(*special, tokenizers.ordinary(words), mask_share, continues, seed)
        tokens = corpus.read(folder, name, verify=verify).tokens
        if name != "train" and evaluation_rows:
            tokens = tokens[: evaluation_rows * length]
        return rows(tokens, at, words, masking)

    shorter = [at for at in (SHORTEST << i for i in range(12)) if at < length]
    return Data(
        train=split("train", length, 0),
        evaluation={
            f"validation-{at}": split("validation", at, EVALUATION_SEED)
            for at in (length, *shorter)
        },
        config={"vocab_size": len(words), "pad_token_id": words.pad_token_id},
        tokenizer=words,
    )


def keep(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, M, V) and (B, M) → (B, M, 2): surprise at each label, and whether it was likeliest."""
    surprise = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    )
    return torch.stack([surprise.view_as(labels), (logits.argmax(-1) == labels).float()], -1)


def score(kept: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
    """Loss (nats a masked token), perplexity and accuracy over all masked tokens."""
    surprise, right = kept[labels != IGNORED].astype(np.float64).mean(0)
    return {
        "loss": float(surprise),
        "perplexity": float(np.exp(min(surprise, 700.0))),
        "accuracy": float(right),
    }


def keep_ordered(logits: tuple[Tensor, ...], labels: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """As `keep`, and whether the order of each row was told right (B,)."""
    return keep(logits[0], labels[0]), (logits[1].argmax(-1) == labels[1]).float()


def score_ordered(kept: tuple[NDArray[Any], ...], labels: Any) -> dict[str, float]:
    """As `score`, and the accuracy of the order."""
    return {**score(kept[0], labels[0]), "order_accuracy": float(kept[1].mean())}


MLM = Task(
    name="mlm",
    summary="Masked language modelling from scratch on packed documents.",
    model=LongspanForMaskedLM,
    load=partial(load, MaskedRows),
    score=score,
    best="-loss",
    keep=keep,
)
MLM_SOP = Task(
    name="mlm-sop",
    summary="Masked language modelling and the order of two segments.",
    model=LongspanForPreTraining,
    load=partial(load, OrderedRows),
    score=score_ordered,
    best="-loss",
    keep=keep_ordered,
)
