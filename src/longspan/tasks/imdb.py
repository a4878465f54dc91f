"""IMDB: is a film review positive? Long texts, cut to the length asked for."""

from __future__ import annotations

from pathlib import Path

import torch

from longspan.models import LongspanForSequenceClassification
from longspan.tasks import metrics, text
from longspan.tasks.base import Data, Task
from longspan.tasks.glue import find_folder, need_tokenizer


def load(
    data_dir: Path, *, length: int, device: torch.device, tokenizer: str | None = None
) -> Data:
    """Reviews from parquet files under `data_dir/imdb` or `data_dir`; it has no validation split.

    The test split is scored at evaluations, too: report the last, not the best of them.
    """
    return text.load(
        find_folder(data_dir, "imdb"),
        columns=("text",),
        num_labels=2,
        train="train",
        evaluation=("test",),
        length=length,
        tokenizer=need_tokenizer(tokenizer),
        hub="stanfordnlp/imdb",
    )


IMDB = Task(
    name="imdb",
    summary="Is a film review positive?",
    model=LongspanForSequenceClassification,
    load=load,
    score=metrics.score_classes,
    best="accuracy",
)
