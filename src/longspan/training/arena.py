"""Many runs of the arena: a matrix of tasks, methods and seeds, and one file of their rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from longspan import records
from longspan.tasks import find as find_task
from longspan.tasks.lra.sets import SETS, prepare
from longspan.training import recipes, settings
from longspan.training.jobs import Job, execute, row_of

METHODS = ("yoso", "softmax", "yoso_expectation", "nystrom", "linformer", "window")
TASKS = tuple(f"lra/{name}" for name in SETS if name != "retrieval-wiki")
SIDE_BY_SIDE = 6  # small models leave most of a GPU idle
SAME = ("task", "method", "seed", "settings", "protocol")


def plan(
    tasks: Sequence[str],
    methods: Sequence[str],
    given: Sequence[str],
    *,
    seeds: int,
    protocol: str,
    data_dir: Path,
    workers: int,
) -> list[Job]:
    """All runs: every method on a task before the next task, every task before the next seed."""
    jobs = []
    for seed, task, method in itertools.product(range(seeds), tasks, methods):
        if not task.startswith("lra/"):
            raise ValueError(f"task must be one of the arena, lra/…, got {task!r}")
        row = find_task(task)
        recipe = recipes.find(task, method, protocol=protocol)
        told = " ".join(settings.telling(recipe, row, method, given))
        recipe = settings.apply(recipe, row, method, settings.parse(given))
        name = "_".join([task.replace("/", "-"), method, protocol, *given, f"seed={seed}"])
        labels = {"settings": told, "protocol": protocol, "side_by_side": workers}
        jobs.append(Job(name, task, method, recipe, data_dir, seed, labels=labels))
    return jobs


def arena(
    tasks: Sequence[str] | None,
    methods: Sequence[str] | None,
    given: Sequence[str],
    *,
    seeds: int,
    protocol: str,
    data_dir: Path,
    output: Path,
    rows: Path | None,
    jobs: int | None,
    time_limit: float | None,
    console: Console | None = None,
) -> int:
    """Run what `rows` does not hold yet, and add to it what is finished; returns the exit code."""
    console = console or Console()
    rows = rows or output / "rows.jsonl"
    workers = jobs or (SIDE_BY_SIDE if torch.cuda.is_available() else 1)
    planned = plan(
        tasks or TASKS, methods or METHODS, given, seeds=seeds, protocol=protocol,
        data_dir=data_dir, workers=workers,
    )  # fmt: skip
    known = {_identity(row) for row in records.read(rows)} if rows.exists() else set()
    wanted = [
        job
        for job in planned
        if _identity({"task": job.task, "method": job.method, "seed": job.seed, **job.labels})
        not in known
    ]
    if not wanted:
        said = f"Nothing is left to run: {rows} has every row."
        console.print(said, soft_wrap=True, highlight=False)
    for task in dict.fromkeys(job.task for job in wanted):
        prepare(task.removeprefix("lra/"), data_dir)

    def keep(job: Job) -> None:
        row = row_of(job, output)
        assert row is not None
        records.append(rows, {k: v for k, v in row.items() if k != "environment"})

    left = execute(
        wanted, output, workers=workers, time_limit=time_limit, console=console, finish=keep
    )
    if left:
        console.print(f"Left: {', '.join(left)}. The same command continues.", soft_wrap=True)
    return 1 if left else 0


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a run this one and no other."""
    return tuple(row.get(name) for name in SAME)
