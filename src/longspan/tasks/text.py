"""Labelled texts and pairs of texts: read, tokenized, batched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.tasks import tokenizer as tokenizers
from longspan.tasks.base import Batch, Data
from longspan.tasks.documents import HUB, load_hub, open_parquet

MULTIPLE = 16  # batches are as long as their longest row, rounded up: fewer shapes


class TextRows:
    """Tokenized rows (with segment types for pairs) and their labels, padded batch by batch."""

    def __init__(
        self, ids: list[NDArray[Any]], second: list[int], labels: NDArray[Any], pad_id: int
    ) -> None:
        self.ids, self.second, self.labels, self.pad_id = ids, second, labels, pad_id

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """`input_ids`, `attention_mask`, `token_type_ids` (B, N) and `labels` (B,)."""
        longest = max(len(self.ids[i]) for i in indices)
        shape = (len(indices), -(-longest // MULTIPLE) * MULTIPLE)
        ids = np.full(shape, self.pad_id, np.int64)
        mask, types = np.zeros(shape, bool), np.zeros(shape, np.int64)
        for row, i in enumerate(indices):
            size = len(self.ids[i])
            ids[row, :size] = self.ids[i]
            mask[row, :size] = True
            types[row, self.second[i] : size] = 1
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "token_type_ids": torch.from_numpy(types),
            "labels": torch.from_numpy(self.labels[np.asarray(indices)]),
        }


def load(
    data_dir: Path,
    *,
    columns: tuple[str, ...],
    num_labels: int,
    train: str,
    evaluation: Sequence[str],
    length: int,
    tokenizer: str | Path,
    hub: str,
) -> Data:
    """The splits of a task: texts in one or two `columns`, "label" beside them.

    Args:
        data_dir: folder with a parquet file for each split (`train.parquet`, or the hub's
            `train-00000-of-00001.parquet`), or `hf:` and anything for the hub's own.
        columns: of the first text and the second.
        num_labels: classes; 1 for a number.
        train: the split to train on.
        evaluation: the splits to score.
        length: tokens to cut rows to.
        tokenizer: as `tokenizer.load` takes it.
        hub: name and configuration of the data on Hugging Face's hub.
    """
    words = tokenizers.needs(_tokenizer(str(tokenizer)))
    read = [
        _rows(str(data_dir), split, columns, num_labels, length, str(tokenizer), hub)
        for split in (train, *evaluation)
    ]
    return Data(
        train=read[0],
        evaluation=dict(zip(evaluation, read[1:], strict=True)),
        config={
            "vocab_size": len(words),
            "num_labels": num_labels,
            "pad_token_id": words.pad_token_id,
        },
        tokenizer=words,
        tokens=float(np.mean([len(row) for row in read[0].ids])),
    )


@cache
def _tokenizer(source: str) -> Any:
    return tokenizers.load(source)


@cache  # a sweep reads and tokenizes each split once
def _rows(
    data_dir: str,
    split: str,
    columns: tuple[str, ...],
    num_labels: int,
    length: int,
    tokenizer: str,
    hub: str,
) -> TextRows:
    words = _tokenizer(tokenizer)
    table = _table(data_dir, split, hub)
    for column in (*columns, "label"):
        if column not in table:
            raise ValueError(
                f"{split} of {data_dir} must have the columns {', '.join((*columns, 'label'))}, "
                f"got {', '.join(table)}"
            )
    dtype = np.float32 if num_labels == 1 else np.int64
    labels = np.asarray(table["label"], dtype)
    if num_labels > 1 and not (np.isin(labels, np.arange(num_labels)).all()):
        raise ValueError(
            f"label must be from 0 to {num_labels - 1} in {split} of {data_dir}, got "
            f"{labels.min()} to {labels.max()} (−1 marks a test split without labels)"
        )
    texts = [list(table[column]) for column in columns]
    found = [words(part, add_special_tokens=False, verbose=False)["input_ids"] for part in texts]
    ids, second = [], []
    for parts in zip(*found, strict=True):
        row, begin = join(parts, length, words.cls_token_id, words.sep_token_id)
        ids.append(np.array(row, np.int32))
        second.append(begin)
    return TextRows(ids, second, labels, words.pad_token_id)


def join(parts: Sequence[list[int]], length: int, cls: int, sep: int) -> tuple[list[int], int]:
    """[CLS] A [SEP] (B [SEP]), cut to `length` from the longer part; and where B begins."""
    room = length - 1 - len(parts)
    first = parts[0]
    if len(parts) == 1:
        row = [cls, *first[:room], sep]
        return row, len(row)
    second = parts[1]
    if len(first) + len(second) > room:
        half = room // 2
        keep = min(len(first), max(half, room - len(second)))
        first, second = first[:keep], second[: room - keep]
    return [cls, *first, sep, *second, sep], len(first) + 2


def _table(data_dir: str, split: str, hub: str) -> dict[str, list[Any]]:
    if data_dir.startswith(HUB):
        rows = load_hub(hub, split=split)
        return {name: rows[name] for name in rows.column_names}
    folder = Path(data_dir)
    files = sorted(folder.glob(f"{split}.parquet")) or sorted(folder.glob(f"{split}-*.parquet"))
    if not files:
        raise FileNotFoundError(f"{folder / split}.parquet is missing: data_dir must have it")
    tables = [open_parquet(file).read().to_pydict() for file in files]
    return {name: [x for table in tables for x in table[name]] for name in tables[0]}
