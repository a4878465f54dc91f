"""The Long Range Arena (Tay et al. 2021): classes of sequences of 1,000 to 4,000 tokens."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.models import LongspanForPairClassification, LongspanForSequenceClassification
from longspan.tasks.base import Data, Task
from longspan.tasks.lra.batches import ByteExamples
from longspan.tasks.lra.sets import SETS, arrange, prepare
from longspan.tasks.lra.splits import Split

__all__ = ["LRA", "load"]

EVALUATION = ("validation", "test")
PADDINGS = 8


def load(
    name: str,
    data_dir: Path,
    *,
    length: int,
    device: torch.device,
    protocol: str = "longspan",
    data_seed: int = 0,
    evaluation_rows: int = 0,
    group_lengths: bool = False,
) -> Data:
    """The splits of a set on the device, as a protocol takes them.

    "longspan": a byte b has the id b + 1, padding alone is 0, validation is held out of training,
    classifiers read the mean over valid tokens. "wisconsin" does as the released code of YOSO and
    Nyströmformer: black pixels are padding, the mean is over the padded length, Text is validated
    on its test set, and incomplete batches are not scored. "google" as that of the arena: the same,
    but for the mean. `data_seed` is of generated sets; `evaluation_rows` how many examples of
    validation and test are scored at most, 0 for all. With `group_lengths` batches are made of
    documents of similar length and padded no further than they need.
    """
    row = SETS[name]
    splits = arrange(name, prepare(name, data_dir, data_seed), protocol)
    if evaluation_rows:
        few = {split: _some(splits[split], evaluation_rows) for split in EVALUATION}
        splits = {**splits, **few}
    if group_lengths:
        splits = {**splits, **{split: _by_length(splits[split]) for split in EVALUATION}}
    examples = {
        split: ByteExamples(
            found.to(device),
            length=min(row.length, length),
            padded=length,
            paddings=PADDINGS if group_lengths else 1,
            zero_is_padding=row.pixels and protocol != "longspan",
        )
        for split, found in splits.items()
    }
    train = examples["train"]
    return Data(
        train=train,
        evaluation={split: examples[split] for split in EVALUATION},
        config={
            "vocab_size": row.symbols + 1,
            "num_labels": row.classes,
            "pad_token_id": 0,
            "pooling": "padded-mean" if protocol == "wisconsin" else "mean",
        },
        resident=True,
        tokens=train.tokens,
        lengths=train.longest.tolist() if group_lengths and train.masked else None,
    )


def _some(split: Split, count: int) -> Split:
    """So many examples, always the same ones; sets may be sorted by label."""
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    return split.pick(order[:count])


def _by_length(split: Split) -> Split:
    """The same examples, short ones first."""
    return split.pick(split.lengths[split.rows].amax(1).argsort(stable=True))


def keep(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, classes) → (B,): the likeliest class."""
    return logits.argmax(-1)


def score(classes: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
    """The share of examples whose class is right."""
    return {"accuracy": float((classes == labels).mean())}


SUMMARIES = {
    "listops": "The value of a nested expression, one of ten: 2,000 symbols; generated.",
    "text": "The sentiment of a film review, from 4,000 bytes of IMDB.",
    "retrieval": "Whether two articles of AAN cite each other, from 4,000 bytes of each.",
    "retrieval-wiki": "Whether two articles of an encyclopedia are linked: like AAN, but not AAN.",
    "image": "The class of a CIFAR-10 picture, one of ten, from 1,024 grey levels.",
    "pathfinder": "Whether two discs lie on one dashed path, from 1,024 grey levels; generated.",
}
LRA = tuple(
    Task(
        name=f"lra/{name}",
        summary=summary,
        model=LongspanForPairClassification
        if name.startswith("retrieval")
        else LongspanForSequenceClassification,
        load=partial(load, name),
        score=score,
        best="accuracy",
        keep=keep,
    )
    for name, summary in SUMMARIES.items()
)
