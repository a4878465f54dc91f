"""Text: the sentiment of a film review, from its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from longspan.tasks.lra.splits import Splits, single

SPLITS = ("train", "test")
LABELS = {"neg": 0, "pos": 1}


def find(data_dir: Path) -> Splits | None:
    """IMDB as `imdb/{train,test}.parquet` (text, label) or as the original `aclImdb` folder."""
    if (data_dir / "imdb" / "train.parquet").exists():
        return single({split: _parquet(data_dir / "imdb" / f"{split}.parquet") for split in SPLITS})
    if (data_dir / "aclImdb" / "train" / "pos").is_dir():
        return single({split: _folder(data_dir / "aclImdb" / split) for split in SPLITS})
    return None


def _parquet(path: Path) -> Iterator[tuple[bytes, int]]:
    from pyarrow import parquet

    table = parquet.read_table(path, columns=["text", "label"])
    for text, label in zip(*(table[name].to_pylist() for name in ("text", "label")), strict=True):
        yield text.encode(), label


def _folder(folder: Path) -> Iterator[tuple[bytes, int]]:
    for name, label in LABELS.items():
        for path in sorted((folder / name).glob("*.txt")):
            yield path.read_bytes(), label
