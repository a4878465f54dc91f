"""Interleaved timing: every case once per round, so that a noisy moment hits all of them alike."""

from __future__ import annotations

import ctypes
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.bench.cases import Case

# Of one GPU sample: eight calls behind another, fewer where they would take longer than this.
CALLS_IN_A_ROW = 8
SAMPLE_SECONDS = 0.02
SETTLED_SECONDS = 0.25  # of a call on a CPU that is its own warm-up


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median over `repeats` calls, and the quartiles around it."""

    seconds: float
    low: float
    high: float
    repeats: int
    host_seconds: float | None = None  # on a GPU, until a call returned: the median, too

    @classmethod
    def of(cls, samples: list[float], host: Sequence[float] = ()) -> Timing:
        """Summarise the seconds of single calls, and those until they returned."""
        returned = statistics.median(host) if host else None
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], 1, returned)
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high, len(samples), returned)

    def fields(self) -> dict[str, float]:
        """What is known, for a row."""
        return {name: value for name, value in asdict(self).items() if value is not None}


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
    _keep_memory()
    end = time.perf_counter() + budget
    in_a_row = dict.fromkeys(calls, 1)
    for _ in range(warmup):
        for name, call in calls.items():
            in_a_row[name] = _in_a_row(_seconds(call, device)[0], device)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    timings: dict[str, Timing] = {}
    for repeat in range(max_repeats):
        if repeat >= min_repeats and time.perf_counter() > end:
            break
        for name, call in calls.items():
            if not samples[name] or samples[name][0] <= patience:
                seconds, returned = _seconds(call, device, in_a_row[name])
                samples[name].append(seconds)
                host[name] += [] if returned is None else [returned]
        timings = {name: Timing.of(taken, host[name]) for name, taken in samples.items()}
        if on_round is not None:
            on_round(timings)
    return timings


def timing_row(case: Case, mode: str, timing: Timing) -> dict[str, Any]:
    """The row that `longspan.records` stores for one timed case."""
    return {"kind": "timing", "mode": mode, **asdict(case), **timing.fields()}


def predict(seconds: Mapping[int, float], length: int) -> float:
    """Time at `length`, on the straight line in log-log through the last two measured lengths.

    No method grows faster than the square of the length, nor slower than the length itself, in
    the long run: noise and overhead at short lengths may say otherwise, so the slope is clamped.
    """
    *before, last = sorted(seconds)
    power = 2.0
    if before:
        slope = math.log(seconds[last] / seconds[before[-1]]) / math.log(last / before[-1])
        power = min(2.0, max(1.0, slope))
    return seconds[last] * (length / last) ** power


def affordable(
    predicted: Mapping[str, float], *, patience: float, left: float, calls: int, keep: str = ""
) -> dict[str, float]:
    """Those of the predicted seconds of a call that may be spent `calls` times.

    Left out are what needs more than `patience` for a call and, slowest first, as many more as it
    takes to finish within the `left` seconds; `keep` goes last, for others are compared with it.
    """
    chosen = {name: t for name, t in predicted.items() if t <= patience}
    while chosen and sum(chosen.values()) * calls > left:
        del chosen[max(chosen, key=lambda name: (name != keep, chosen[name]))]
    return chosen


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """The call captured as a CUDA graph when it is first made, and replayed from then on."""
    graph: torch.cuda.CUDAGraph | None = None

    def run() -> None:
        nonlocal graph
        if graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # until nothing is compiled, or recorded, any more
                    call()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
        graph.replay()

    return run


def peak_bytes(call: Callable[[], object], device: str = "cuda") -> int | None:
    """Bytes that a call needs beyond what was there before, its results included.

    On a GPU, of torch's allocator; on Linux's CPUs, of the process's resident memory; None where
    neither can be read.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        _trim()(0)  # what was freed and is still held would be used again unseen
        _PROCESS.joinpath("clear_refs").write_text("5")  # forget the peak so far
        resident = _kilobytes("VmRSS")
        call()
        return max(0, 1024 * (_kilobytes("VmHWM") - resident))
    except (OSError, AttributeError):
        return None


_PROCESS = Path("/proc/self")


def _kilobytes(name: str) -> int:
    lines = _PROCESS.joinpath("status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@functools.cache
def _trim() -> Callable[[int], int]:
    return ctypes.CDLL(None).malloc_trim  # glibc's


@functools.cache
def _keep_memory() -> None:
    """Let glibc keep up to 1 GB of what calls free, in pieces of up to 32 MB.

    A process that frees all it has after each call, as only a benchmark does, gets fresh pages at
    every call or at none, by chance: Nyström with backward took 13 or 20 ms for 1,024 tokens.
    """
    keep, alone = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
    try:
        limit = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    limit(keep, 1 << 30)
    limit(alone, 32 << 20)


def _in_a_row(seconds: float, device: str) -> int:
    """How many calls of so many seconds make one sample."""
    if torch.device(device).type != "cuda":
        return 1
    return max(1, min(CALLS_IN_A_ROW, int(SAMPLE_SECONDS / seconds)))


def _once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _seconds(
    call: Callable[[], object], device: str, in_a_row: int = 1
) -> tuple[float, float | None]:
    """Of a call, and on a GPU until it returned: where that is as long, the GPU waits for it."""
    if torch.device(device).type != "cuda":
        taken = _once(call)
        # What ran before it left the caches and the process's memory to itself: a method that came
        # after a large one took three times as long. A short call is timed when it follows itself.
        return (taken if taken > SETTLED_SECONDS else _once(call)), None
    # A call returns before its kernels have run: events on the GPU's own clock see them. Several
    # calls behind one that does not count, as in training: what ran before it left the host's
    # caches to itself, and the GPU would wait for the first launch. Backward passes run in this
    # thread, as in `longspan train`: to hand one over to torch's own can take longer than the pass.
    with torch.cuda.device(device), torch.autograd.set_multithreading_enabled(False):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        begin.record()
        start = time.perf_counter()
        for _ in range(in_a_row):
            call()
        returned = time.perf_counter() - start
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1000 / in_a_row, returned / in_a_row
