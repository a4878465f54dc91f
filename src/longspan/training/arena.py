"""Many runs of the arena: the commands of a matrix, some side by side, going on where they stopped.

Each run is a process, `longspan train … --resume`, with a folder of its own; finished ones are
added to one file of rows, and are not run again.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from longspan import records
from longspan.tasks.lra.sets import SETS, prepare

METHODS = ("yoso", "softmax", "yoso_expectation", "nystrom", "linformer", "window")
GRACE = 30.0  # seconds that a run has to write its checkpoint after the time limit
POLL = 0.5


@dataclass(frozen=True)
class Cell:
    """One run of a matrix."""

    task: str
    method: str
    seed: int
    protocol: str
    settings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """What makes it this run and no other."""
        return " ".join(
            [self.task, self.method, self.protocol, f"seed={self.seed}", *self.settings]
        )

    def folder(self, output: Path) -> Path:
        """Where its checkpoints are."""
        return output / self.key.replace("/", "-").replace(" ", "_")

    def command(self, data_dir: Path, output: Path, time_limit: float | None) -> list[str]:
        """The command that runs it."""
        command = [sys.executable, "-m", "longspan", "train", self.task]
        command += ["--method", self.method, "--protocol", self.protocol, "--seed", str(self.seed)]
        command += ["--data-dir", str(data_dir), "--output", str(self.folder(output)), "--resume"]
        for setting in self.settings:
            command += ["--set", setting]
        return command if time_limit is None else [*command, "--time-limit", f"{time_limit:.0f}"]


def matrix(
    tasks: Sequence[str],
    methods: Sequence[str],
    seeds: int,
    protocol: str,
    settings: Sequence[str] = (),
) -> list[Cell]:
    """All runs: every method on a task before the next task, every task before the next seed."""
    return [
        Cell(task, method, seed, protocol, tuple(settings))
        for seed, task, method in itertools.product(range(seeds), tasks, methods)
    ]


def run(
    cells: Iterable[Cell],
    *,
    data_dir: Path,
    output: Path,
    rows: Path,
    jobs: int,
    time_limit: float | None = None,
    console: Console | None = None,
) -> int:
    """Run what `rows` does not hold yet, `jobs` at a time; returns how many are still to be done.

    At the time limit (seconds) runs stop with a checkpoint, and the same command continues them.
    """
    console = console or Console()
    begin = time.monotonic()
    known = {row.get("key") for row in records.read(rows)} if rows.exists() else set()
    waiting = [cell for cell in cells if cell.key not in known]
    for name in dict.fromkeys(cell.task.removeprefix("lra/") for cell in waiting):
        prepare(name, data_dir)
    running: dict[Cell, tuple[subprocess.Popen[bytes], float]] = {}
    left = 0

    def remaining() -> float | None:
        return None if time_limit is None else time_limit - (time.monotonic() - begin)

    while waiting or running:
        over = time_limit is not None and (remaining() or 0) <= 0
        if over and waiting:
            left += len(waiting)
            waiting = []
        while waiting and len(running) < jobs:
            cell = waiting.pop(0)
            running[cell] = _start(cell, data_dir, output, remaining(), jobs), time.monotonic()
            console.print(f"{cell.key}: started", soft_wrap=True, highlight=False)
        for cell, (process, since) in list(running.items()):
            if process.poll() is None:
                if over and (remaining() or 0) < -GRACE:
                    process.kill()
                continue
            del running[cell]
            said = _finish(cell, output, rows, jobs, time.monotonic() - since, process.returncode)
            left += said is None
            log = cell.folder(output) / "log.txt"
            said = said or f"not finished (exit code {process.returncode}, see {log})"
            console.print(f"{cell.key}: {said}", soft_wrap=True, highlight=False)
        time.sleep(POLL)
    return left


def _start(
    cell: Cell, data_dir: Path, output: Path, time_limit: float | None, jobs: int
) -> subprocess.Popen[bytes]:
    """Start a run, with its share of the cores."""
    folder = cell.folder(output)
    folder.mkdir(parents=True, exist_ok=True)
    threads = str(max(1, len(os.sched_getaffinity(0)) // jobs))
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            cell.command(data_dir, output, time_limit),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": threads},
        )


def _finish(
    cell: Cell, output: Path, rows: Path, jobs: int, seconds: float, code: int
) -> str | None:
    """Add the row of a run that ended well, and say how it went; None for one that did not."""
    own = cell.folder(output) / "rows.jsonl"
    if code != 0 or not own.exists():
        return None
    row = records.read(own)[-1]
    row |= {"key": cell.key, "protocol": cell.protocol, "side_by_side": jobs, "wall": seconds}
    records.append(rows, {name: value for name, value in row.items() if name != "environment"})
    found = " ".join(f"{name} {x['accuracy']:.4f}" for name, x in row["metrics"].items())
    spent = f"{row['steps']} steps in {row['seconds']:.0f} s, {seconds:.0f} s in all"
    return f"accuracy {found}, {spent}"


def default_jobs() -> int:
    """How many runs side by side keep this machine busy: small models leave a GPU idle."""
    return 6 if torch.cuda.is_available() else 1


def tasks() -> list[str]:
    """The tasks of the arena whose data are generated or may be got by anyone."""
    return [f"lra/{name}" for name in SETS if name != "retrieval-wiki"]
