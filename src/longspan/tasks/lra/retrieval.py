"""Retrieval: whether two documents belong together, from the bytes of each."""

from __future__ import annotations

from pathlib import Path

from longspan.tasks.lra.splits import Splits, collect

CUT = 4000  # bytes of a document that any protocol reads
FILES = {"train": "train", "validation": "eval", "test": "test"}


def find(data_dir: Path) -> Splits | None:
    """The released AAN pairs, `tsv_data/new_aan_pairs.*.tsv`, here or under `lra_release`.

    A line is label, two identifiers, two texts. Each document is kept once.
    """
    for folder in (data_dir / "tsv_data", data_dir / "lra_release" / "tsv_data"):
        paths = {split: folder / f"new_aan_pairs.{name}.tsv" for split, name in FILES.items()}
        if paths["train"].exists():
            known: dict[bytes, int] = {}
            splits = {split: _lines(path, known) for split, path in paths.items()}
            return collect(list(known), splits)
    return None


def _lines(path: Path, known: dict[bytes, int]) -> tuple[list[list[int]], list[int]]:
    rows, labels = [], []
    with path.open("rb") as file:
        for line in file:
            label, _, _, *texts = line.rstrip(b"\r\n").split(b"\t")
            rows.append([known.setdefault(text[:CUT], len(known)) for text in texts[:2]])
            labels.append(int(float(label)))
    return rows, labels


def find_wiki(data_dir: Path) -> Splits | None:
    """Links between articles, `wiki_schools/{articles,pairs_*}.parquet`: like AAN, but not AAN.

    Articles have a text, in the order of their identifiers; pairs have doc1, doc2 and label.
    """
    folder = data_dir / "wiki_schools"
    if not (folder / "articles.parquet").exists():
        return None
    from pyarrow import parquet

    texts = parquet.read_table(folder / "articles.parquet", columns=["text"])["text"].to_pylist()
    splits = {}
    for split in FILES:
        table = parquet.read_table(folder / f"pairs_{split}.parquet")
        left, right, labels = (table[name].to_pylist() for name in ("doc1", "doc2", "label"))
        splits[split] = [list(pair) for pair in zip(left, right, strict=True)], labels
    return collect([text.encode()[:CUT] for text in texts], splits)
