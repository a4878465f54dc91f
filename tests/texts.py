"""Small made-up texts with something to learn: what follows a word is mostly decided by it."""

import random

import pyarrow as pa
import pyarrow.parquet as pq

from longspan.tasks import corpus, tokenizer

WORDS = [a + b for a in ("ba", "do", "ki", "lu", "me", "po", "ru", "sa") for b in ("n", "r", "st")]


def document(number: int, sentences: int = 30) -> str:
    """A document: each sentence walks through the words, from anywhere, in steps of five."""
    rng = random.Random(number)
    said = []
    for _ in range(sentences):
        place = rng.randrange(len(WORDS))
        said.append(" ".join(WORDS[(place + 5 * i) % len(WORDS)] for i in range(8)) + ".")
    return " ".join(said)


def write_corpus(folder, documents: int = 60):
    """A prepared corpus of such documents; a word is a token."""
    raw = folder / "raw"
    raw.mkdir()
    texts = [document(i) for i in range(documents)]
    pq.write_table(pa.table({"text": texts}), raw / "all.parquet")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join([*tokenizer.SPECIAL, ".", *WORDS]))
    return corpus.prepare([raw], folder / "corpus", tokenizer=vocabulary)


def write_task(folder, columns: tuple[str, ...], rows: int = 96, classes: int = 2):
    """A labelled task, whose labels mean nothing."""
    folder.mkdir(parents=True)
    for split, first in (("train", 0), ("validation", 10_000), ("test", 20_000)):
        count = rows if split == "train" else 24
        labels = [i % max(classes, 2) for i in range(count)]
        table = {"label": [float(x) for x in labels] if classes == 1 else labels}
        for column in columns:
            table[column] = [document(first + i * 7 + labels[i], 2) for i in range(count)]
        pq.write_table(pa.table(table), folder / f"{split}.parquet")
    return folder
