"""Where text comes from: folders of parquet and text files, or `datasets` of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HUB = "hf:"  # hf:name or hf:name:configuration
PREPARED = "longspan-tokens"  # the folder beside data where tokens are kept
SPLITS = ("train", "validation", "test")
ALIASES = {"valid": "validation", "dev": "validation", "val": "validation"}
HELD_OUT = 20  # where nothing says which documents are held out, one in so many is


def documents(sources: Iterable[str | Path], column: str = "text") -> Iterator[tuple[str, str]]:
    """Yield (split, text) of every document of sources, without reading them all at once.

    A source is a parquet or text file, a folder of them (a text file is one document), or
    `hf:name[:configuration]`. The split is the parquet column "split" or else what a file or one of
    its folders is named after: train, validation (valid, val, dev), test. Where nothing says, every
    20th document is held out for validation.
    """
    found = (document for source in sources for document in _raw(source, column))
    for number, (split, text) in enumerate(found, start=1):
        yield split or ("validation" if number % HELD_OUT == 0 else "train"), text


def _raw(source: str | Path, column: str) -> Iterator[tuple[str | None, str]]:
    if str(source).startswith(HUB):
        yield from _hub(str(source).removeprefix(HUB), column)
        return
    root = Path(source)
    files = text_files(root)
    for path in files:
        split = split_of(path, root)
        if path.suffix == ".parquet":
            for row_split, text in _parquet(path, column):
                yield row_split or split, text
        else:
            yield split, _text(path)


def text_files(root: Path) -> list[Path]:
    """The parquet and text files of a folder, or the one file, sorted by name."""
    if root.is_file():
        return [root]
    found = sorted(
        path
        for path in root.rglob("*")
        if path.suffix in (".parquet", ".txt") and PREPARED not in path.parts
    )
    if not found:
        what = "which has none" if root.exists() else "which does not exist"
        raise FileNotFoundError(
            f"data_dir must hold .parquet or .txt files, or be hf:NAME, got {root}, {what}"
        )
    return found


def split_of(path: Path, root: Path) -> str | None:
    """The split that a file or one of its folders below the root is named after."""
    below = path.relative_to(root) if root.is_dir() else Path(path.name)
    for part in reversed(below.parts):
        word = part.split(".")[0].split("-")[0].split("_")[0].lower()
        word = ALIASES.get(word, word)
        if word in SPLITS:
            return word
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"text files must be UTF-8, got {path}: {error}; convert it or take it out"
        ) from None


def _parquet(path: Path, column: str) -> Iterator[tuple[str | None, str]]:
    file = open_parquet(path)
    names = file.schema_arrow.names
    if column not in names:
        raise ValueError(
            f"column must be one of {', '.join(names)} in {path}, got {column!r}; "
            "name the column of the text with --column, or --set column=NAME to train"
        )
    wanted = [column, "split"] if "split" in names else [column]
    for part in file.iter_batches(batch_size=256, columns=wanted):
        texts = part.column(column).to_pylist()
        splits = part.column("split").to_pylist() if "split" in names else [None] * len(texts)
        for split, text in zip(splits, texts, strict=True):
            if text:
                yield None if split is None else ALIASES.get(split, split), text


def open_parquet(path: Path) -> Any:
    """A parquet file to read from; a damaged one is an error that names it."""
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"data must be whole parquet files, got {path}: {str(error).splitlines()[0]}; "
            "fetch or write it again"
        ) from None


def load_hub(name: str, **options: Any) -> Any:
    """A dataset of Hugging Face by `name[:configuration]`; says what is missing where it is."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"data_dir hf:{name} needs the package datasets: pip install datasets"
        ) from None
    path, _, configuration = name.partition(":")
    try:
        return datasets.load_dataset(path, configuration or None, **options)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"data_dir must name a dataset within reach, got hf:{name}: "
            f"{str(error).splitlines()[0]}"
        ) from None


def _hub(name: str, column: str) -> Iterator[tuple[str | None, str]]:
    splits = load_hub(name, streaming=True)
    alone = len(splits) == 1
    for split, rows in splits.items():
        for row in rows:
            if column not in row:
                raise ValueError(f"column must be one of {', '.join(row)}, got {column!r}")
            if row[column]:
                yield None if alone else ALIASES.get(split, split), row[column]
