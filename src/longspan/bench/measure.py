"""Interleaved timing: every case once per round, so that a noisy moment hits all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from longspan.bench.cases import Case

# Of one GPU sample: eight calls in a row, fewer where they would take longer than this.
CALLS_IN_A_ROW = 8
SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median over `repeats` calls, and the quartiles around it."""

    seconds: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Summarise the seconds of single calls."""
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples))


def measure(
    calls: Mapping[str, Callable[[], object]],
    *,
    budget: float,
    warmup: int = 1,
    min_repeats: int = 3,
    max_repeats: int = 25,
    patience: float = float("inf"),
    device: str = "cpu",
    on_round: Callable[[dict[str, Timing]], None] | None = None,
) -> dict[str, Timing]:
    """Time each of `calls` in turn, round after round, until `budget` seconds are spent.

    At least `min_repeats` rounds follow `warmup` rounds that do not count, even where they take
    longer than the budget; a call that took longer than `patience` is not repeated. `on_round` sees
    the timings so far after every round.
    """
    end = time.perf_counter() + budget
    in_a_row = dict.fromkeys(calls, 1)
    for _ in range(warmup):
        for name, call in calls.items():
            in_a_row[name] = _in_a_row(_seconds(call, device), device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    timings: dict[str, Timing] = {}
    for repeat in range(max_repeats):
        if repeat >= min_repeats and time.perf_counter() > end:
            break
        for name, call in calls.items():
            if not samples[name] or samples[name][0] <= patience:
                samples[name].append(_seconds(call, device, in_a_row[name]))
        timings = {name: Timing.of(taken) for name, taken in samples.items()}
        if on_round is not None:
            on_round(timings)
    return timings


def timing_row(case: Case, mode: str, timing: Timing) -> dict[str, Any]:
    """The row that `longspan.records` stores for one timed case."""
    return {"kind": "timing", "mode": mode, **asdict(case), **asdict(timing)}


def _in_a_row(seconds: float, device: str) -> int:
    """How many calls of so many seconds make one sample."""
    if torch.device(device).type != "cuda":
        return 1
    return max(1, min(CALLS_IN_A_ROW, int(SAMPLE_SECONDS / seconds)))


def _seconds(call: Callable[[], object], device: str, in_a_row: int = 1) -> float:
    if torch.device(device).type != "cuda":
        start = time.perf_counter()
        for _ in range(in_a_row):
            call()
        return (time.perf_counter() - start) / in_a_row
    # A call returns before its kernels have run: events on the GPU's own clock see them. Several
    # calls in a row, as in training, keep the wait for the first launch out of the figure.
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(in_a_row):
            call()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1000 / in_a_row
