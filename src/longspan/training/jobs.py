"""Many runs: side by side, in the order of their needs, stopped in time, continued later."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from longspan import records
from longspan.training.recipes import Recipe

WAITING = 5.0  # seconds between looks at the clock


@dataclass(frozen=True)
class Job:
    """One run of many, small enough to be sent to another process.

    Args:
        name: also of its folder.
        task, method, recipe, data_dir, seed: as in `Run`.
        needs: the job whose model it starts from, if any.
        start: or the folder of a model that is there already.
        labels: further fields of its row.
        save_model: whether another needs its model.
    """

    name: str
    task: str
    method: str
    recipe: Recipe
    data_dir: Path
    seed: int = 0
    needs: str | None = None
    start: Path | None = None
    labels: dict[str, Any] = field(default_factory=dict)
    save_model: bool = False


def execute(
    jobs: Sequence[Job],
    work: Path,
    *,
    workers: int = 1,
    time_limit: float | None = None,
    console: Console,
    finish: Callable[[Job], None] = lambda job: None,
) -> list[str]:
    """Run what is not finished yet; returns the names of the jobs that still are not.

    Each job has the folder `work/NAME` with its log, checkpoints and rows; a row marks it finished.
    `finish` is called with every job whose row is there, as soon as it is.
    """
    for job in jobs:
        _check_unchanged(job, work)
    deadline = None if time_limit is None else time.time() + time_limit
    finished = {job.name for job in jobs if row_of(job, work) is not None}
    for job in jobs:
        if job.name in finished:
            finish(job)
    waiting = [job for job in jobs if job.name not in finished]
    running: dict[Future[tuple[str, bool]], Job] = {}
    begin = time.time()
    interrupted = False
    with _workers(workers) as pool:
        while waiting or running:
            late = interrupted or (deadline is not None and time.time() > deadline)
            for job in [] if late else list(waiting):
                ready = job.needs is None or job.needs in finished
                if ready and len(running) < workers:
                    waiting.remove(job)
                    running[pool.submit(_work, job, work, deadline)] = job
            if not running:
                break  # what waits still waits for what was stopped or failed
            done, _ = wait(running, timeout=WAITING, return_when=FIRST_COMPLETED)
            for future in done:
                job = running.pop(future)
                try:
                    told, signalled = future.result()
                    interrupted = interrupted or signalled
                except Exception as error:  # one failed run must not end the others
                    told = f"failed: {type(error).__name__}: {error}"
                if row_of(job, work) is not None:
                    finished.add(job.name)
                    finish(job)
                console.print(
                    f"{time.time() - begin:6.0f} s  {job.name}: {told}", soft_wrap=True,
                    highlight=False, markup=False,
                )  # fmt: skip
    return [job.name for job in jobs if job.name not in finished]


def _check_unchanged(job: Job, work: Path) -> None:
    """What was begun with other settings is neither continued nor taken for this."""
    path = work / job.name / "run.json"
    if path.is_file() and json.loads(path.read_text())["recipe"] != asdict(job.recipe):
        raise ValueError(
            f"the folder of runs must be new where settings have changed, got {path.parent}, which "
            "was made with others"
        )


def row_of(job: Job, work: Path) -> dict[str, Any] | None:
    """The last row of a finished job, None where there is none yet."""
    path = work / job.name / "rows.jsonl"
    rows = records.read(path) if path.is_file() else []
    return rows[-1] if rows else None


def collect(jobs: Sequence[Job], work: Path, rows: Path) -> int:
    """Write the rows of all finished jobs to one file, in their order; returns how many."""
    lines = [
        (work / job.name / "rows.jsonl").read_text().splitlines()[-1] + "\n"
        for job in jobs
        if row_of(job, work) is not None
    ]
    rows.parent.mkdir(parents=True, exist_ok=True)
    unfinished = rows.with_name(f"{rows.name}.part")
    unfinished.write_text("".join(lines))
    unfinished.replace(rows)
    return len(lines)


class _Here(Executor):
    """One worker: this process, at once."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _workers(count: int) -> Executor:
    if count == 1:
        return _Here()
    return ProcessPoolExecutor(count, get_context("spawn"), _begin_worker)


def _begin_worker() -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _work(job: Job, work: Path, deadline: float | None) -> tuple[str, bool]:
    """Run a job; returns a line about how it ended, and whether a signal ended it."""
    from longspan.tasks import find
    from longspan.training.run import FINISHED, Run, train

    folder = work / job.name
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(
        find(job.task),
        job.method,
        job.recipe,
        job.data_dir,
        folder,
        job.seed,
        start=job.start if job.needs is None else work / job.needs / "model",
        labels=job.labels,
        save_model=job.save_model,
    )
    limit = None if deadline is None else max(0.0, deadline - time.time())
    with (folder / "log.txt").open("a") as log:
        outcome = train(run, resume=True, time_limit=limit, console=Console(file=log, width=120))
    if outcome.status != FINISHED or outcome.row is None:
        told = f"stopped at step {outcome.step} ({outcome.reason})"
        return told, outcome.signal is not None
    row = outcome.row
    rate = row["tokens_per_second"] or 0
    scores = "  ".join(
        f"{split} " + " ".join(f"{name} {value:.4f}" for name, value in values.items())
        for split, values in row["metrics"].items()
    )
    return f"{row['steps']} steps, {row['seconds']:.1f} s, {rate:,.0f} tokens/s; {scores}", False
