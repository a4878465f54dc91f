"""GLUE: nine tasks of one sentence or two, each with the metric that GLUE defines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longspan.models import LongspanForSequenceClassification
from longspan.tasks import metrics, text
from longspan.tasks.base import Data, Task
from longspan.tasks.documents import HUB, PREPARED


@dataclass(frozen=True)
class Kind:
    """What differs between the tasks of GLUE."""

    summary: str
    columns: tuple[str, ...]
    score: Callable[[Any, Any], dict[str, float]]
    best: str
    num_labels: int = 2
    evaluation: tuple[str, ...] = ("validation",)


PAIR = ("sentence1", "sentence2")
GLUE: dict[str, Kind] = {
    "cola": Kind("Is a sentence grammatical?", ("sentence",), metrics.score_matthews, "matthews"),
    "sst2": Kind("Is a review's sentence positive?", ("sentence",),
                 metrics.score_classes, "accuracy"),
    "mrpc": Kind("Do two sentences say the same?", PAIR, metrics.score_f1, "f1"),
    "qqp": Kind("Do two questions ask the same?", ("question1", "question2"),
                metrics.score_f1, "f1"),
    "stsb": Kind("How alike are two sentences, 0 to 5?", PAIR,
                 metrics.score_correlation, "pearson", num_labels=1),
    "mnli": Kind("Does a premise entail a hypothesis?", ("premise", "hypothesis"),
                 metrics.score_classes, "accuracy", num_labels=3,
                 evaluation=("validation_matched", "validation_mismatched")),
    "qnli": Kind("Does a sentence answer a question?", ("question", "sentence"),
                 metrics.score_classes, "accuracy"),
    "rte": Kind("Does one sentence entail another?", PAIR, metrics.score_classes, "accuracy"),
    "wnli": Kind("Does a pronoun mean what is said?", PAIR, metrics.score_classes, "accuracy"),
}  # fmt: skip


def load(
    name: str,
    data_dir: Path,
    *,
    length: int,
    device: torch.device,
    tokenizer: str | None = None,
    train: str = "train",
) -> Data:
    """A task of GLUE: parquet files under `data_dir/glue/NAME`, `data_dir/NAME` or `data_dir`."""
    kind = GLUE[name]
    return text.load(
        find_folder(data_dir, f"glue/{name}"),
        columns=kind.columns,
        num_labels=kind.num_labels,
        train=train,
        evaluation=kind.evaluation,
        length=length,
        tokenizer=need_tokenizer(tokenizer),
        hub=f"nyu-mll/glue:{name}",
    )


def find_folder(data_dir: Path, name: str) -> Path:
    """The folder of a task below `data_dir`, which may be that folder itself."""
    if str(data_dir).startswith(HUB):
        return data_dir
    tried = [data_dir / name, data_dir / Path(name).name, data_dir]
    for folder in tried:
        if any(folder.glob("*.parquet")) or (folder / PREPARED).is_dir():
            return folder
    raise FileNotFoundError(
        f"data_dir must hold {name}/train.parquet and the like, got {data_dir}, which has none"
    )


def need_tokenizer(tokenizer: str | None) -> str:
    """The tokenizer's source; there is no default."""
    if tokenizer is None:
        raise ValueError(
            "tokenizer must be given where no trained model is: --start FOLDER brings its own, "
            "--set tokenizer=PATH names one"
        )
    return tokenizer


TASKS = tuple(
    Task(
        name=f"glue/{name}",
        summary=kind.summary,
        model=LongspanForSequenceClassification,
        load=partial(load, name),
        score=kind.score,
        best=kind.best,
    )
    for name, kind in GLUE.items()
)
