"""What a task is: data as batches, a head, a metric. Nothing here knows a method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

Batch = dict[str, Tensor]


class Examples(Protocol):
    """The rows of one split, numbered, and made into batches."""

    def __len__(self) -> int: ...

    def batch(self, indices: Sequence[int], epoch: int) -> Batch:
        """The arguments of the model's `forward` for these rows, `labels` among them.

        What is random about a row (masks, order) depends on its number and the epoch alone, so that
        neither an interruption nor the number of processes changes it. Evaluation is epoch 0.
        """


@dataclass(frozen=True)
class Data:
    """The splits of a task, and what they ask of a model.

    Args:
        train: rows to train on.
        evaluation: by name; the first decides which checkpoint is best and when to stop, the others
            are scored once, at the end.
        config: fields of `LongspanConfig` that the data decide: vocab_size, num_labels, …
        resident: whether batches are already on the training device.
        tokenizer: saved beside the model, where there is one; has `save_pretrained(folder)`.
        tokens: of a training row on average, padding not counted; the length unless given.
        lengths: tokens of every training row; where given, batches are made of similar ones.
    """

    train: Examples
    evaluation: dict[str, Examples]
    config: dict[str, Any]
    resident: bool = False
    tokenizer: Any = None
    tokens: float | None = None
    lengths: Sequence[int] | None = None


@dataclass(frozen=True)
class Task:
    """A row of TASKS.

    Args:
        name: as `longspan train` takes it.
        summary: one line.
        model: the class of `longspan.models` with the head.
        load: `load(data_dir, length=…, device=…, **options)` gives its `Data`; its further keywords
            are what `--set` may change about the data.
        score: from what `keep` left of all logits, and all labels, to named numbers.
        best: the number that decides which checkpoint is best, as "accuracy", or "-loss" where
            smaller is better.
        keep: `keep(logits, labels)` on each batch, on its device: what `score` needs of it.
    """

    name: str
    summary: str
    model: Any
    load: Callable[..., Data]
    score: Callable[[Any, Any], dict[str, float]]
    best: str
    keep: Callable[[Any, Any], Any] | None = None
