"""The bodies of `longspan train` and `longspan tokenize`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from rich.console import Console

from longspan.attention.methods import find as find_method
from longspan.tasks import TASKS, corpus
from longspan.tasks import find as find_task
from longspan.training import recipes, run, settings
from longspan.training.arena import arena
from longspan.training.sweep import sweep

__all__ = ["TASKS", "arena", "sweep", "tokenize", "train"]


def train(
    task: str,
    method: str,
    given: list[str],
    *,
    data_dir: Path | None,
    output: Path,
    size: str | None,
    length: int | None,
    protocol: str | None,
    start: Path | None,
    seed: int | None,
    resume: bool,
    eval_only: bool,
    keep_best: bool,
    time_limit: float | None,
    tensorboard: bool,
) -> int:
    """Train as the command line says; returns the exit code, 128 + N after signal N.

    A run that is continued or scored is what it was, but for what is set anew.
    """
    row = find_task(task)
    find_method(method)
    changes = settings.parse(given)
    if "length" in changes:
        raise ValueError(f"length must be given by --length, got --set length={changes['length']}")
    if tensorboard and not find_spec("tensorboard"):
        raise ModuleNotFoundError("--tensorboard needs tensorboard: pip install tensorboard")
    before: list[str] = []  # settings of what is continued
    if (resume or eval_only) and (output / run.RUN).is_file():
        was = run.written_down(output)
        if (was["task"], was["method"]) != (task, method):
            raise ValueError(
                f"output must be of {task} with {method}, got {output}, which is of {was['task']} "
                f"with {was['method']}"
            )
        before = was.get("settings", "").split()
        recipe = was["recipe"] if length is None else was["recipe"].changed(length=length)
        changed = {setting.partition("=")[0] for setting in before}
        sizes = recipes.size(size) if size else {}
        same = all(recipe.config.get(x) == y for x, y in sizes.items() if x not in changed)
        if not same or protocol not in (None, recipe.data.get("protocol")):
            raise ValueError(
                f"size and protocol must be those of the run in {output}, or left out, got "
                f"{size!r} and {protocol!r}"
            )
        seed = was["seed"] if seed is None else seed
        start = start or (None if was["start"] is None else Path(was["start"]))
        data_dir = data_dir or Path(was["data_dir"])
    else:
        recipe = recipes.find(task, method, model_size=size, length=length, protocol=protocol)
        if start is not None and size is not None:
            raise ValueError(f"size must be left out: {start} has its own, got {size!r}")
        if start is not None:
            recipe = recipe.from_start()
    told = settings.telling(recipe, row, method, given)
    recipe = settings.apply(recipe, row, method, changes)
    last = {setting.partition("=")[0]: setting for setting in (*before, *told)}
    if keep_best:
        recipe = recipe.changed(keep_best=True)
    outcome = run.train(
        run.Run(
            row, method, recipe, data_dir or Path("data"), output, seed or 0, start,
            labels={"settings": " ".join(last.values())}, tensorboard=tensorboard,
        ),
        resume=resume, eval_only=eval_only, time_limit=time_limit,
    )  # fmt: skip
    _part()
    console = Console(stderr=True)
    if outcome.status == run.STOPPED:
        console.print(
            f"Stopped at step {outcome.step} ({outcome.reason}), with a checkpoint in {output}. "
            "The same command with --resume continues.",
            soft_wrap=True,
        )
        return 128 + outcome.signal if outcome.signal else 0
    return 0


def _part() -> None:
    """Processes that worked together wait for each other: one that ends early may take others down.

    Their connections close while threads of the others still listen.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


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
