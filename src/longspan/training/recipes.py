"""Recipes: everything about a run but its data and seed, as functions of task and method.

Sources: the hyper-parameters of the YOSO, Nyströmformer and Linformer papers and of their released
code. What the papers left open (small corpora, few steps) is what `--set` is for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from longspan.attention import checks
from longspan.training import lra as arena

SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128),
    "small": dict(
        num_hidden_layers=4, hidden_size=512, num_attention_heads=8, intermediate_size=2048
    ),
    "base": dict(
        num_hidden_layers=12, hidden_size=768, num_attention_heads=12, intermediate_size=3072
    ),
}
SCHEDULES = ("linear", "constant", "cosine", "inverse_sqrt", "one_cycle")
PRECISIONS = ("auto", "bf16", "fp32")


@dataclass(frozen=True)
class Recipe:
    """How one run is made.

    Args:
        length: tokens of a sequence.
        batch: sequences of a step, over all processes and accumulated parts.
        learning_rate: its peak.
        steps: of the optimizer; 0 counts `epochs` instead.
        epochs: passes over the training rows.
        warmup: steps of linear warm-up; below 1, a share of all steps.
        schedule: after warm-up: "linear" or "cosine" to zero, "constant", or "inverse_sqrt";
            "one_cycle" is torch's `OneCycleLR`, linear: warm-up begins at 1/25 of the peak, and
            Adam's β₁ falls from 0.95 to 0.85 while the rate grows, and rises again.
        weight_decay, adam_beta2, adam_epsilon: of AdamW.
        clip: norm that gradients are clipped to; 0 leaves them.
        accumulate: parts that a step's batch is computed in, for less memory.
        checkpointing: compute layers again in the backward pass, for less memory.
        precision: "bf16" under autocast, "fp32", or "auto": bf16 on a GPU that has it.
        evaluate_every: steps between evaluations; 0 evaluates each epoch, or at the end of a run
            that counts steps.
        log_every: steps between losses shown.
        save_every: steps between checkpoints; 0 saves only when the run is stopped.
        patience: evaluations without improvement after which training stops; 0 never stops it.
        compile: whether `torch.compile` is used: a minute to start, faster steps.
        graph: whether steps are replayed as a CUDA graph, which takes one launch instead of
            hundreds: for small models on one NVIDIA GPU.
        evaluation_batch: sequences of a step of evaluation; 0 takes those of training.
        keep_best: score and save the weights of the best evaluation instead of the last.
        config: fields of `LongspanConfig`.
        options: of the method.
        data: options of the task's data.
    """

    length: int
    batch: int
    learning_rate: float
    steps: int = 0
    epochs: float = 0.0
    warmup: float = 0.0
    schedule: str = "linear"
    weight_decay: float = 0.01
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-6
    clip: float = 1.0
    accumulate: int = 1
    checkpointing: bool = False
    precision: str = "auto"
    evaluate_every: int = 0
    log_every: int = 10
    save_every: int = 0
    patience: int = 0
    compile: bool = False
    graph: bool = False
    evaluation_batch: int = 0
    keep_best: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what nothing below checks."""
        for name in ("length", "batch", "accumulate", "log_every"):
            checks.integer(name, getattr(self, name), 1)
        for name in ("steps", "evaluate_every", "save_every", "patience", "evaluation_batch"):
            checks.integer(name, getattr(self, name), 0)
        for name in ("learning_rate", "epochs", "warmup", "weight_decay", "adam_beta2",
                     "adam_epsilon", "clip"):  # fmt: skip
            checks.number(name, getattr(self, name), 0)
        for name in ("checkpointing", "compile", "graph", "keep_best"):
            checks.boolean(name, getattr(self, name))
        checks.choice("schedule", self.schedule, SCHEDULES)
        checks.choice("precision", self.precision, PRECISIONS)
        if not self.steps and self.epochs <= 0:
            raise ValueError("epochs must be above 0 where steps is 0, got 0")

    def from_start(self) -> Recipe:
        """For a trained model, which is what it is: nothing about model and method is changed."""
        return dataclasses.replace(self, config={}, options={})

    def changed(self, **changes: Any) -> Recipe:
        """A copy with some fields changed; `config`, `options` and `data` are merged."""
        for name in ("config", "options", "data"):
            if name in changes:
                changes[name] = {**getattr(self, name), **changes[name]}
        return dataclasses.replace(self, **changes)


def options(method: str, length: int) -> dict[str, Any]:
    """What the papers give each method at pre-training; other methods keep their defaults."""
    papers: dict[str, dict[str, Any]] = {
        "yoso": {"num_hashes": 32, "hash_bits": 9},  # the published 4096 model has 9 bits, too
        "yoso_expectation": {"hash_bits": 9},
        "nystrom": {"num_landmarks": 64, "conv_kernel": 33},
        "linformer": {"projected_length": min(256, length)},
    }
    return papers.get(method, {})


def size(name: str) -> dict[str, int]:
    """The layers and widths of a named size."""
    checks.choice("size", name, SIZES)
    return SIZES[name]


def mlm(method: str, *, task: str, model_size: str = "small", length: int = 512) -> Recipe:
    """BERT-style pre-training (YOSO's small model; Nyströmformer's differs in the steps).

    512 tokens: batch 256, 1e-4, 1 % warm-up, a million steps (base: half a million). Longer, from a
    512 model: 5e-5, batch 64, 75,000 steps.
    """
    long = length > 512
    return Recipe(
        length=length,
        batch=64 if long else 256,
        learning_rate=5e-5 if long else 1e-4,
        steps=75_000 if long else {"base": 500_000}.get(model_size, 1_000_000),
        warmup=0.01,
        evaluate_every=2000,
        save_every=2000,
        config=dict(size(model_size), max_position_embeddings=length),
        options=options(method, length),
    )


def glue(method: str, *, task: str, model_size: str = "small", length: int = 128) -> Recipe:
    """Fine-tuning: AdamW, 3e-5, batch 32, 4 epochs, 5 % warm-up (Nyströmformer's settings).

    `GRID` holds the learning rates and batch sizes that the papers search for MRPC, RTE and the
    other small ones.
    """
    return Recipe(
        length=length,
        batch=32,
        learning_rate=3e-5,
        epochs=4,
        warmup=0.05,
        config=dict(size(model_size), max_position_embeddings=max(512, length)),
        options=options(method, length),
    )


GRID: dict[str, list[Any]] = {"learning_rate": [2e-5, 3e-5, 4e-5, 5e-5], "batch": [8, 16, 32]}


def imdb(method: str, *, task: str, model_size: str = "small", length: int = 512) -> Recipe:
    """Fine-tuning on reviews cut to 512 or 4096 tokens, as `glue`."""
    return glue(method, task=task, model_size=model_size, length=length)


def lra(
    method: str,
    *,
    task: str,
    model_size: str | None = None,
    length: int | None = None,
    protocol: str = "longspan",
) -> Recipe:
    """The Long Range Arena, as `longspan.training.lra` says."""
    recipe = Recipe(**arena.fields(method, task, length=length, protocol=protocol))
    return recipe if model_size is None else recipe.changed(config=size(model_size))


FAMILIES: dict[str, Callable[..., Recipe]] = {
    "mlm": mlm,
    "mlm-sop": mlm,
    "glue": glue,
    "imdb": imdb,
    "lra": lra,
}


def find(
    task: str,
    method: str,
    *,
    model_size: str | None = None,
    length: int | None = None,
    protocol: str | None = None,
) -> Recipe:
    """The recipe of a task ("glue/rte" is of the family "glue") for a method.

    `model_size`, `length` and `protocol` are the recipe's own unless given.
    """
    family = task.partition("/")[0]
    checks.choice("task", family, FAMILIES)
    if protocol is not None and family != "lra":
        raise ValueError(f"protocol must be left out for {task}: only lra/… has one")
    given = {"task": task, "model_size": model_size, "length": length, "protocol": protocol}
    return FAMILIES[family](method, **{k: v for k, v in given.items() if v is not None})
