"""The bodies of `longspan train` and `longspan tokenize`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from longspan.attention.methods import find as find_method
from longspan.tasks import TASKS, corpus
from longspan.tasks import find as find_task
from longspan.training import arena as runs
from longspan.training import recipes, run, settings

__all__ = ["TASKS", "arena", "tokenize", "train"]


def train(
    task: str,
    method: str,
    given: list[str],
    *,
    data_dir: Path,
    output: Path,
    size: str | None,
    length: int | None,
    protocol: str | None,
    start: Path | None,
    seed: int,
    resume: bool,
    eval_only: bool,
    keep_best: bool,
    time_limit: float | None,
    tensorboard: bool,
) -> int:
    """Train as the command line says; returns the exit code, 128 + N after signal N."""
    row = find_task(task)
    find_method(method)
    if tensorboard and not find_spec("tensorboard"):
        raise ModuleNotFoundError("--tensorboard needs tensorboard: pip install tensorboard")
    recipe = recipes.find(task, method, model_size=size, length=length, protocol=protocol)
    recipe = settings.apply(recipe, row, method, settings.parse(given))
    outcome = run.train(
        run.Run(
            row, method, recipe, data_dir, output, seed, start,
            keep_best=keep_best or recipe.keep_best, tensorboard=tensorboard,
        ),
        resume=resume, eval_only=eval_only, time_limit=time_limit,
    )  # fmt: skip
    console = Console(stderr=True)
    if outcome.status == run.STOPPED:
        console.print(
            f"Stopped at step {outcome.step} ({outcome.reason}), with a checkpoint in {output}. "
            "The same command with --resume continues.",
            soft_wrap=True,
        )
        return 128 + outcome.signal if outcome.signal else 0
    return 0


def arena(
    tasks: list[str] | None,
    methods: list[str] | None,
    given: list[str],
    *,
    seeds: int,
    protocol: str,
    data_dir: Path,
    output: Path,
    rows: Path | None,
    jobs: int | None,
    time_limit: float | None,
) -> int:
    """Run a matrix of the Long Range Arena; returns how many runs are not finished."""
    cells = runs.matrix(
        tasks or runs.tasks(), methods or list(runs.METHODS), seeds, protocol, given
    )
    for cell in cells:  # what cannot be run is said before anything is
        if not cell.task.startswith("lra/"):
            raise ValueError(f"task must be one of the arena, lra/…, got {cell.task!r}")
        recipe = recipes.find(cell.task, cell.method, protocol=protocol)
        settings.apply(recipe, find_task(cell.task), cell.method, settings.parse(given))
    left = runs.run(
        cells, data_dir=data_dir, output=output, rows=rows or output / "rows.jsonl",
        jobs=jobs or runs.default_jobs(), time_limit=time_limit,
    )  # fmt: skip
    if left:
        Console(stderr=True).print(
            f"{left} runs are not finished. The same command continues.", soft_wrap=True
        )
    return left


def tokenize(
    sources: list[str], output: Path, *, vocab_size: int, tokenizer: str | None, column: str
) -> None:
    """Tokenize sources into a folder, and say what is in it."""
    corpus.prepare(sources, output, vocab_size=vocab_size, tokenizer=tokenizer, column=column)
    console = Console()
    for split in corpus.splits(output):
        part = corpus.read(output, split)
        console.print(
            f"{split}: {len(part.starts):,} documents, {len(part.tokens):,} tokens, "
            f"{part.entropy:.3f} nats a token if each were drawn alone",
            soft_wrap=True,
        )
