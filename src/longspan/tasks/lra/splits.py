"""Labelled sequences of bytes: how every set of the arena is kept, in memory and on disk."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Documents of bytes, one after another, and what examples are made of.

    Attributes:
        data: uint8, all documents.
        starts: (documents,) where each begins.
        lengths: (documents,) how long each is.
        rows: (examples, k) documents of each example: one, or two in a pair.
        labels: (examples,).
    """

    data: Tensor
    starts: Tensor
    lengths: Tensor
    rows: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def pick(self, indices: Tensor | slice) -> Split:
        """Some of the examples, of the same documents."""
        return Split(self.data, self.starts, self.lengths, self.rows[indices], self.labels[indices])

    def to(self, device: torch.device | str) -> Split:
        """The same on another device."""
        tensors = self.data, self.starts, self.lengths, self.rows, self.labels
        return Split(*(x.to(device) for x in tensors))

    def document(self, index: int) -> bytes:
        """The bytes of one document."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        return self.data[start : start + length].cpu().numpy().tobytes()


Splits = dict[str, Split]


def collect(
    documents: Sequence[bytes], splits: Mapping[str, tuple[Sequence[Sequence[int]], Sequence[int]]]
) -> Splits:
    """Split by split from documents and, for each split, rows of documents and labels."""
    lengths = torch.tensor([len(x) for x in documents])
    data = torch.frombuffer(bytearray(b"".join(documents) or b"\0"), dtype=torch.uint8)
    tensors = {name: (torch.tensor(x), torch.tensor(y)) for name, (x, y) in splits.items()}
    return from_arrays(data, lengths, tensors)


def from_arrays(
    data: Tensor, lengths: Tensor, splits: Mapping[str, tuple[Tensor, Tensor]]
) -> Splits:
    """Split by split from the bytes and lengths of documents, and rows and labels."""
    lengths = lengths.long()
    starts = lengths.cumsum(0) - lengths
    return {
        name: Split(data, starts, lengths, rows.long().view(len(labels), -1), labels.long())
        for name, (rows, labels) in splits.items()
    }


def single(parts: Mapping[str, Iterable[tuple[bytes, int]]]) -> Splits:
    """Split of one document each, from (document, label) by split."""
    documents: list[bytes] = []
    splits = {}
    for name, pairs in parts.items():
        found = list(pairs)
        first = len(documents)
        documents += [document for document, _ in found]
        rows = [[i] for i in range(first, len(documents))]
        splits[name] = rows, [label for _, label in found]
    return collect(documents, splits)


def save(path: Path, splits: Splits) -> None:
    """Write all splits, which share their documents, into one compressed file."""
    first = next(iter(splits.values()))
    arrays: dict[str, np.ndarray] = {
        "data": first.data.numpy(),
        "lengths": first.lengths.to(torch.int32).numpy(),
    }
    for name, examples in splits.items():
        arrays[f"{name}.rows"] = examples.rows.to(torch.int32).numpy()
        arrays[f"{name}.labels"] = examples.labels.to(torch.uint8).numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, arrays)


def write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write what `np.load` reads; a file that is there is whole."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    # numpy's own compression takes five times as long for a tenth less.
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array))
    partial.replace(path)


def load(path: Path) -> Splits:
    """Read what `save` wrote."""
    with np.load(path) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    names = [name.removesuffix(".labels") for name in arrays if name.endswith(".labels")]
    return from_arrays(
        arrays["data"],
        arrays["lengths"],
        {name: (arrays[f"{name}.rows"], arrays[f"{name}.labels"]) for name in names},
    )


def checksum(splits: Splits) -> str:
    """SHA-256 of the contents, whatever the compression of a file."""
    digest = hashlib.sha256()
    first = next(iter(splits.values()))
    digest.update(first.data.numpy().tobytes())
    digest.update(first.lengths.numpy().tobytes())
    for name, examples in sorted(splits.items()):
        digest.update(name.encode())
        digest.update(examples.rows.numpy().tobytes())
        digest.update(examples.labels.numpy().tobytes())
    return digest.hexdigest()
