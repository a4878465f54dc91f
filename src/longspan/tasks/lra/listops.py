"""ListOps: the value of a nested expression over digits, one of ten."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from longspan.tasks.lra.generate import Part, generate
from longspan.tasks.lra.splits import Splits, single
from longspan.tasks.lra.trees import SYMBOLS, grow

SIZES = {"train": 96_000, "validation": 2_000, "test": 2_000}
FILES = {"train": "basic_train.tsv", "validation": "basic_val.tsv", "test": "basic_test.tsv"}
CODES = {symbol: code for code, symbol in enumerate(SYMBOLS)}


def encode(source: str) -> bytes:
    """The released text of a tree as codes of SYMBOLS; its parentheses say nothing more."""
    words = source.replace("(", " ").replace(")", " ").split()
    try:
        return bytes(CODES[word] for word in words)
    except KeyError as error:
        raise ValueError(f"source must be made of {' '.join(SYMBOLS)}, got {error}") from None


def find(data_dir: Path) -> Splits | None:
    """The released set, `listops-1000/basic_*.tsv`, here or under `lra_release`."""
    for folder in (data_dir / "listops-1000", data_dir / "lra_release" / "listops-1000"):
        if (folder / FILES["train"]).exists():
            return single({split: _read(folder / name) for split, name in FILES.items()})
    return None


def _read(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            yield encode(row["Source"]), int(row["Target"])


def make(
    folder: Path, seed: int, sizes: dict[str, int] = SIZES, workers: int | None = None
) -> Splits:
    """Generate the set: 100,000 distinct trees."""
    return generate(folder, _trees, sizes, seed=seed, title="ListOps", workers=workers)


def _trees(rng: np.random.Generator, count: int) -> Part:
    return grow(rng, count)
