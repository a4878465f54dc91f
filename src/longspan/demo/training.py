"""The demo's second part: one small reader per method, all trained on the same documents."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from longspan.demo.model import Reader
from longspan.demo.recorder import Recorder
from longspan.demo.task import NUM_TOPICS, NUM_WORDS, Documents, documents

CHANCE = 1 / NUM_WORDS


@dataclass(frozen=True)
class Recipe:
    """What every reader is trained with; `options` holds what single methods need besides.

    `budget` limits the seconds of all readers together, for machines slower than thought.
    """

    length: int
    batch: int
    steps: int
    num_checks: int
    held_out: int
    budget: float
    options: Mapping[str, Mapping[str, Any]]
    learning_rate: float = 1e-2

    @property
    def description(self) -> str:
        """The task, for readers of the output."""
        return (
            f"A document of up to {self.length:,} tokens has {NUM_TOPICS} paragraphs, each with a "
            "topic and a favourite word; the first tokens ask for the favourite word of every "
            "topic. Attention that sees only its neighbourhood (window) has to guess."
        )


def run_training(
    methods: Sequence[str],
    recipe: Recipe,
    recorder: Recorder,
    console: Console,
    *,
    seed: int,
    device: str,
) -> None:
    """Train a reader per method with progress bars, then print accuracy against seconds."""
    progress = Progress(
        TextColumn("{task.description:<16}"),
        BarColumn(bar_width=12),
        TextColumn("{task.completed:>3.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=console,
        auto_refresh=False,
    )
    left = recipe.budget
    with progress:
        bars = {m: progress.add_task(m, total=recipe.steps, state="", start=False) for m in methods}
        for number, (method, bar) in enumerate(bars.items()):
            progress.start_task(bar)
            start = time.perf_counter()
            # Half as much again as an equal share: methods differ, and the last must get its own.
            limit = left * min(1.0, 1.5 / (len(bars) - number))
            right = ""
            for row in train(method, recipe, seed=seed, device=device):
                recorder.add(row)
                if row["accuracy"] is not None:
                    right = f", {row['accuracy']:.0%} right"
                late = time.perf_counter() - start > limit and row["step"] < recipe.steps
                state = f"loss {row['loss']:.2f}{right}{', out of time' * late}"
                progress.update(bar, advance=1, state=state)
                progress.refresh()
                if late:
                    break
            progress.stop_task(bar)
            left -= time.perf_counter() - start
    console.print(f"\nCorrect answers on new documents (guessing: {CHANCE:.1%}), against time:")
    console.print(result_table(recorder))
    for method in methods:
        if method in recipe.options:
            console.print(f"[dim]{method}: {_written(recipe.options[method])}[/]", highlight=False)


def train(method: str, recipe: Recipe, *, seed: int, device: str) -> Iterator[dict[str, Any]]:
    """Train one reader and yield a row per step.

    All methods start from the same seed and see the same documents. "seconds" counts the steps
    alone; "accuracy", on documents never trained on, is there for every check and None between.
    """
    torch.manual_seed(seed)
    options = recipe.options.get(method, {})
    model = Reader(method, length=recipe.length, **options).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps, pct_start=0.1
    )
    data = torch.Generator().manual_seed(seed)
    about = {
        "kind": "training",
        "task": "topics",
        "description": recipe.description,
        "method": method,
        "options": dict(options),
        "length": recipe.length,
        "batch": recipe.batch,
        "steps": recipe.steps,
        "chance": CHANCE,
        "seed": seed,
    }
    seconds = 0.0
    for step in range(1, recipe.steps + 1):
        batch = _to(documents(recipe.batch, recipe.length, data), device)
        start = time.perf_counter()
        logits = model(batch.topics, batch.words, batch.padding)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        value = loss.item()  # waits for the device
        seconds += time.perf_counter() - start
        check = step * recipe.num_checks % recipe.steps < recipe.num_checks
        accuracy = evaluate(model, recipe, seed=seed, device=device) if check else None
        yield {**about, "step": step, "loss": value, "seconds": seconds, "accuracy": accuracy}


@torch.no_grad()
def evaluate(model: Reader, recipe: Recipe, *, seed: int, device: str) -> float:
    """Share of correct answers on held-out documents, the same ones at every call."""
    held_out = torch.Generator().manual_seed(seed + 1_000_003)
    model.eval()
    right = []
    for _ in range(recipe.held_out // recipe.batch):
        batch = _to(documents(recipe.batch, recipe.length, held_out), device)
        answers = model(batch.topics, batch.words, batch.padding).argmax(-1)
        right.append((answers == batch.labels).float().mean())
    model.train()
    return float(torch.stack(right).mean())


def result_table(recorder: Recorder) -> Table:
    """Accuracy against time: a cell tells how many answers are right after how many seconds."""
    rows = [r for r in recorder.rows if r["kind"] == "training" and r["accuracy"] is not None]
    steps = sorted({row["step"] for row in rows})
    table = Table()
    table.add_column("method", no_wrap=True)
    for step in steps:
        table.add_column(f"step {step}", justify="right", no_wrap=True)
    for method in dict.fromkeys(row["method"] for row in rows):
        taken = {row["step"]: row for row in rows if row["method"] == method}
        cells = [
            f"{taken[step]['accuracy']:.0%} [dim]{taken[step]['seconds']:.0f} s[/]"
            if step in taken
            else ""
            for step in steps
        ]
        table.add_row(method, *cells)
    return table


def _written(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _to(batch: Documents, device: str) -> Documents:
    return Documents(*(tensor.to(device) for tensor in batch))
