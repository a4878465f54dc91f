"""Small made-up texts with something to learn: what follows a word is mostly decided by it."""

import random

import pyarrow as pa
import pyarrow.parquet as pq

from longspan.tasks import corpus

WORDS = [a + b for a in ("ba", "do", "ki", "lu", "me", "po", "ru", "sa") for b in ("n", "r", "st")]


def document(number: int, sentences: int = 30) -> str:
    """A document of its own topic: each sentence walks through the words in steps of one size."""
    rng = random.Random(number)
    step = rng.choice([1, 5, 7])
    said = []
    for _ in range(sentences):
        place = rng.randrange(len(WORDS))
        said.append(" ".join(WORDS[(place + step * i) % len(WORDS)] for i in range(8)) + ".")
    return " ".join(said)


def write_corpus(folder, documents: int = 60, vocab_size: int = 100):
    """A prepared corpus of such documents."""
    raw = folder / "raw"
    raw.mkdir()
    texts = [document(i) for i in range(documents)]
    pq.write_table(pa.table({"text": texts}), raw / "all.parquet")
    return corpus.prepare([raw], folder / "corpus", vocab_size=vocab_size)


def write_task(folder, columns: tuple[str, ...], rows: int = 96, classes: int = 2):
    """A labelled task: the label is told by the step size of the (last) text."""
    folder.mkdir(parents=True)
    for split, first in (("train", 0), ("validation", 10_000), ("test", 20_000)):
        count = rows if split == "train" else 24
        labels = [i % max(classes, 2) for i in range(count)]
        table = {"label": [float(x) for x in labels] if classes == 1 else labels}
        for column in columns:
            table[column] = [document(first + i * 7 + labels[i], 2) for i in range(count)]
        pq.write_table(pa.table(table), folder / f"{split}.parquet")
    return folder
