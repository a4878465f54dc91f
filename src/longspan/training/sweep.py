"""Sweeps: a task for every combination of methods, settings and seeds; a table of medians."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from longspan.tasks import find as find_task
from longspan.training import recipes, settings
from longspan.training.jobs import Job, collect, execute
from longspan.training.tables import sweep_table


def plan(
    task: str,
    methods: Sequence[str],
    vary: dict[str, list[Any]],
    fixed: dict[str, Any],
    *,
    data_dir: Path,
    size: str | None = None,
    length: int | None = None,
    start: Path | None = None,
    seeds: int = 1,
) -> list[Job]:
    """A job for every combination; `length` may be varied, too, and positions follow it."""
    jobs = []
    for method, values in itertools.product(methods, itertools.product(*vary.values())):
        chosen = dict(zip(vary, values, strict=True))
        recipe = recipes.find(
            task, method, model_size=size, length=chosen.get("length", length)
        )  # fmt: skip
        if start is not None:
            recipe = recipe.from_start()
        recipe = settings.apply(recipe, find_task(task), method, {**fixed, **chosen})
        name = "-".join([task.replace("/", "-"), method, *(f"{k}={v}" for k, v in chosen.items())])
        labels = {"varied": {"method": method, **chosen} if len(methods) > 1 else chosen}
        jobs += [
            Job(f"{name}-seed={seed}", task, method, recipe, data_dir, seed, labels=labels,
                start=start)
            for seed in range(seeds)
        ]  # fmt: skip
    return jobs


def sweep(
    task: str,
    methods: Sequence[str],
    vary: Sequence[str],
    given: Sequence[str],
    *,
    data_dir: Path,
    output: Path,
    size: str | None,
    length: int | None,
    start: Path | None,
    seeds: int,
    grid: bool,
    jobs: int,
    time_limit: float | None,
) -> int:
    """Run a sweep as the command line says; returns the exit code."""
    factors = dict(recipes.GRID) if grid else {}
    for name, equals, text in (one.partition("=") for one in vary):
        if not equals or not text:
            raise ValueError(f"--vary must be name=value,value, got {name + equals!r}")
        factors[name] = [settings.parse([f"{name}={v}"])[name] for v in text.split(",")]
    planned = plan(
        task, methods, factors, settings.parse(given), data_dir=data_dir, size=size,
        length=length, start=start, seeds=seeds,
    )  # fmt: skip
    console = Console()
    left = execute(planned, output, workers=jobs, time_limit=time_limit, console=console)
    collect(planned, output, output / "rows.jsonl")
    table = sweep_table(output / "rows.jsonl")
    (output / "table.md").write_text(table)
    console.print(table, soft_wrap=True, highlight=False, markup=False)
    if left:
        console.print(f"Left: {', '.join(left)}. The same command continues.", soft_wrap=True)
    return 1 if left else 0
