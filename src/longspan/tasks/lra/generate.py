"""Sets made by a generator: in parts, side by side, going on where they stopped."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

from longspan.tasks.lra.splits import Splits, from_arrays, write

Part = tuple[list[bytes], Sequence[int]]  # documents and their labels
PART = 1000


def generate(
    folder: Path,
    make: Callable[[np.random.Generator, int], Part],
    sizes: dict[str, int],
    *,
    seed: int,
    title: str,
    workers: int | None = None,
) -> Splits:
    """Make as many examples as `sizes` says, by split, and keep parts in `folder` meanwhile.

    Part i depends on (seed, i) alone, so the result does not depend on `workers` (default: all
    cores) nor on interruptions. `make` must be a function of a module.
    """
    total = sum(sizes.values())
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        (folder / f"{seed}-{i:04}.npz", make, (seed, i), min(PART, total - i * PART))
        for i in range(-(-total // PART))
    ]
    missing = [job for job in jobs if not job[0].exists()]
    workers = min(workers or len(os.sched_getaffinity(0)), max(1, len(missing)))
    for _ in track(_done(missing, workers), title, total=len(missing), disable=len(missing) < 2):
        pass
    documents: list[bytes] = []
    labels: list[np.ndarray] = []
    for path, *_ in jobs:
        with np.load(path) as part:
            edges = part["lengths"].cumsum()
            documents += [x.tobytes() for x in np.split(part["data"], edges[:-1])]
            labels.append(part["labels"])
    shutil.rmtree(folder)
    assert len(set(documents)) == total, "two examples are the same: the seeds are not independent"
    data = torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)
    ends = np.cumsum(list(sizes.values()))
    every = torch.from_numpy(np.concatenate(labels))
    splits = {
        name: (torch.arange(int(end) - size, int(end)), every[int(end) - size : int(end)])
        for (name, size), end in zip(sizes.items(), ends, strict=True)
    }
    return from_arrays(data, torch.tensor([len(x) for x in documents]), splits)


def _done(jobs: list[tuple], workers: int) -> Iterable[None]:
    """Do all jobs, and yield after each."""
    if workers == 1:
        yield from map(_part, jobs)
        return
    # Forked children would inherit torch's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(_part, jobs)


def _part(job: tuple[Path, Callable[..., Part], tuple[int, int], int]) -> None:
    """Make one part and write it."""
    path, make, entropy, count = job
    documents, labels = make(np.random.default_rng(entropy), count)
    arrays: dict[str, np.ndarray] = {
        "data": np.frombuffer(b"".join(documents), np.uint8),
        "lengths": np.array([len(x) for x in documents], np.int32),
        "labels": np.asarray(labels, np.uint8),
    }
    write(path, arrays)
