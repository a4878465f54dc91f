"""Labelled texts and pairs of texts: read, tokenized once, batched."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from longspan.tasks import tokenizer as tokenizers
from longspan.tasks.base import Batch, Data
from longspan.tasks.documents import HUB, PREPARED, load_hub, open_parquet

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


@cache  # a sweep reads each split once
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
    read = tokens(data_dir, split, columns, words, hub)
    labels = read["labels"].astype(np.float32 if num_labels == 1 else np.int64)
    if num_labels > 1 and not np.isin(labels, np.arange(num_labels)).all():
        raise ValueError(
            f"label must be from 0 to {num_labels - 1} in {split} of {data_dir}, got "
            f"{labels.min()} to {labels.max()} (−1 marks a test split without labels)"
        )
    parts = [
        np.split(read[f"ids{i}"], np.cumsum(read[f"sizes{i}"])[:-1]) for i in range(len(columns))
    ]
    ids, second = [], []
    for row in zip(*parts, strict=True):
        joined, begin = join(row, length, words.cls_token_id, words.sep_token_id)
        ids.append(joined)
        second.append(begin)
    return TextRows(ids, second, labels, words.pad_token_id)


def tokens(
    data_dir: str, split: str, columns: tuple[str, ...], words: Any, hub: str
) -> dict[str, NDArray[Any]]:
    """The ids of every text of a split, end to end, with their sizes and labels.

    Tokenized once for each tokenizer and kept beside the data; written whole or not at all, and
    read with a checksum. Where only that is left of the data, it will do.
    """
    if data_dir.startswith(HUB):
        return _tokenize(_hub_table(hub, split), f"{split} of {hub}", columns, words)
    folder = Path(data_dir)
    sources = _files(folder, split)
    kept = folder / PREPARED / tokenizers.fingerprint(words) / f"{split}.npz"
    if kept.is_file():
        try:
            with kept.open("rb") as raw, np.load(raw) as file:  # checks the sums of what it reads
                found = dict(file)
        except (OSError, ValueError, zipfile.BadZipFile):
            raise ValueError(f"{kept} is damaged: delete it, and it will be made again") from None
        if not sources or int(found["bytes"]) == sum(path.stat().st_size for path in sources):
            return found
    if not sources:
        raise FileNotFoundError(f"{folder / split}.parquet is missing: data_dir must have it")
    tables = [open_parquet(path).read().to_pydict() for path in sources]
    table = {name: [x for part in tables for x in part[name]] for name in tables[0]}
    found = _tokenize(table, f"{split} of {data_dir}", columns, words)
    found["bytes"] = np.array(sum(path.stat().st_size for path in sources))
    _keep(kept, found)
    return found


def _tokenize(
    table: dict[str, list[Any]], where: str, columns: tuple[str, ...], words: Any
) -> dict[str, NDArray[Any]]:
    for column in (*columns, "label"):
        if column not in table:
            raise ValueError(
                f"{where} must have the columns {', '.join((*columns, 'label'))}, "
                f"got {', '.join(table)}"
            )
    found = {"labels": np.asarray(table["label"])}
    dtype = np.uint16 if len(words) <= 2**16 else np.uint32
    for i, column in enumerate(columns):
        ids = words(list(table[column]), add_special_tokens=False, verbose=False)["input_ids"]
        found[f"sizes{i}"] = np.array([len(x) for x in ids], np.int32)
        found[f"ids{i}"] = np.concatenate([np.array(x, dtype) for x in ids])
    return found


def _keep(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write beside the data, if one may."""
    unfinished = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        unfinished.replace(path)
    except OSError:
        unfinished.unlink(missing_ok=True)


def join(
    parts: Sequence[NDArray[Any]], length: int, cls: int, sep: int
) -> tuple[NDArray[np.int32], int]:
    """[CLS] A [SEP] (B [SEP]), cut to `length` from the longer part; and where B begins."""
    room = length - 1 - len(parts)
    first, *more = parts
    if more and len(first) + len(more[0]) > room:
        keep = min(len(first), max(room // 2, room - len(more[0])))
        first, more = first[:keep], [more[0][: room - keep]]
    first = first[:room]
    row = [cls, *first.tolist(), sep]
    for part in more:
        row += [*part.tolist(), sep]
    return np.array(row, np.int32), len(first) + 2


def _files(folder: Path, split: str) -> list[Path]:
    return sorted(folder.glob(f"{split}.parquet")) or sorted(folder.glob(f"{split}-*.parquet"))


def _hub_table(hub: str, split: str) -> dict[str, list[Any]]:
    rows = load_hub(hub, split=split)
    return {name: list(rows[name]) for name in rows.column_names}
