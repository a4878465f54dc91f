"""A corpus as token ids on disk: written once, whole or not at all, memory-mapped and checksummed.

A folder holds `corpus.json`, the tokenizer, and for each split `SPLIT.bin`, the ids of all
documents, each followed by [SEP], and `SPLIT.documents.npy`, where documents begin.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from longspan.tasks import tokenizer as tokenizers
from longspan.tasks.documents import PREPARED, SPLITS, documents, text_files

INDEX = "corpus.json"
FOLDER_VERSION = 1
AT_ONCE = 64  # documents


@dataclass(frozen=True)
class Corpus:
    """One split: `tokens` (T,) memory-mapped, `starts` (documents,) the first token of each."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    entropy: float  # of a token drawn from the split, in nats


def prepare(
    sources: Iterable[str | Path],
    folder: Path,
    *,
    tokenizer: str | Path | None = None,
    vocab_size: int = 16_384,
    column: str = "text",
) -> Path:
    """Tokenize sources into a folder, with a tokenizer given or trained on their training split.

    The folder appears when everything in it is written.
    """
    sources = list(sources)
    if folder.exists():
        raise FileExistsError(f"output must be a new folder, got {folder}")
    if tokenizer is None:
        texts = (text for split, text in documents(sources, column) if split == "train")
        made = tokenizers.train(texts, vocab_size)
    else:
        made = tokenizers.needs(tokenizers.load(tokenizer))
    unfinished = folder.with_name(f"{folder.name}.part{os.getpid()}")
    unfinished.mkdir(parents=True)
    try:
        _write(sources, unfinished, made, column)
        made.save_pretrained(str(unfinished))
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def prepared(data_dir: Path | str, **options: Any) -> Path:
    """The folder of tokens of `data_dir`: itself, or made inside it when it is first asked for.

    It is made anew when the files or the options have changed.
    """
    folder = Path(data_dir)
    if (folder / INDEX).is_file():
        return folder
    if str(data_dir).startswith("hf:"):
        raise ValueError(
            f"data_dir must be a folder that `longspan tokenize {data_dir} --output FOLDER` made, "
            f"got {data_dir}"
        )
    root = folder if folder.is_dir() else folder.parent
    files = [(str(p.relative_to(root)), p.stat().st_size, p.stat().st_mtime_ns)
             for p in text_files(folder)]  # fmt: skip
    mark = json.dumps([FOLDER_VERSION, files, {k: str(v) for k, v in options.items()}])
    target = root / PREPARED / hashlib.sha256(mark.encode()).hexdigest()[:16]
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    with FileLock(f"{target}.lock"):  # several runs may begin at once
        return target if target.exists() else prepare([folder], target, **options)


def read(folder: Path, split: str, *, verify: bool = True) -> Corpus:
    """Open one split; a file that is missing, cut off or changed is an error that names it."""
    index = _index(folder)
    if split not in index["splits"]:
        raise ValueError(
            f"split must be one of {', '.join(index['splits'])} in {folder}, got {split!r}"
        )
    about = index["splits"][split]
    path = folder / f"{split}.bin"
    starts = folder / f"{split}.documents.npy"
    for file in (path, starts):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: run longspan tokenize again")
    dtype = np.dtype(index["dtype"])
    size = about["tokens"] * dtype.itemsize
    if path.stat().st_size != size:
        raise ValueError(
            f"{path} must have {size} bytes, got {path.stat().st_size}: run longspan tokenize again"
        )
    if verify and _checksum(path) != about["sha256"]:
        raise ValueError(f"{path} is not what was written: run longspan tokenize again")
    return Corpus(np.memmap(path, dtype, "r"), np.load(starts), about["entropy"])


def splits(folder: Path) -> list[str]:
    """The names of the splits of a prepared folder."""
    return list(_index(folder)["splits"])


def _index(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / INDEX).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{folder / INDEX} must be readable, got {error}: run longspan tokenize again"
        ) from None


def _write(sources: list[str | Path], folder: Path, tokenizer: Any, column: str) -> None:
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32)
    paths = {split: folder / f"{split}.bin" for split in SPLITS}
    starts: dict[str, list[int]] = {split: [] for split in SPLITS}
    totals = dict.fromkeys(SPLITS, 0)
    counts = {split: np.zeros(len(tokenizer), np.int64) for split in SPLITS}
    with ExitStack() as stack:
        files = {split: stack.enter_context(path.open("wb")) for split, path in paths.items()}
        for split, ids in _tokenized(sources, tokenizer, column):
            array = np.array([*ids, tokenizer.sep_token_id], dtype)
            files[split].write(array.tobytes())
            starts[split].append(totals[split])
            totals[split] += len(array)
            counts[split] += np.bincount(array, minlength=len(tokenizer))
    index: dict[str, Any] = {"version": FOLDER_VERSION, "dtype": dtype.name, "splits": {}}
    for split, path in paths.items():
        if not totals[split]:
            path.unlink()
            continue
        np.save(folder / f"{split}.documents.npy", np.array(starts[split], np.int64))
        index["splits"][split] = {
            "tokens": totals[split],
            "documents": len(starts[split]),
            "entropy": _entropy(counts[split]),
            "sha256": _checksum(path),
        }
    if {"train", "validation"} - set(index["splits"]):
        raise ValueError(
            "data_dir must have documents to train on and others to hold out (20 or more, or a "
            f"split of that name), got {', '.join(index['splits']) or 'none'}"
        )
    (folder / INDEX).write_text(json.dumps(index, indent=1))


def _tokenized(
    sources: list[str | Path], tokenizer: Any, column: str
) -> Iterator[tuple[str, list[int]]]:
    """Split and ids of every document, many at a time: the tokenizer has threads of its own."""
    items = documents(sources, column)
    while part := list(islice(items, AT_ONCE)):
        found = tokenizer([text for _, text in part], add_special_tokens=False, verbose=False)
        for (split, _), ids in zip(part, found["input_ids"], strict=True):
            if split not in SPLITS:
                raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
            yield split, ids


def _entropy(counts: NDArray[np.int64]) -> float:
    shares = counts[counts > 0] / counts.sum()
    return -math.fsum((shares * np.log(shares)).tolist())


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
