"""The demo's first part: every method over growing length, until it becomes too slow."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

from longspan.bench import MODES, Case, Timing, measure, timing_row
from longspan.demo.recorder import Recorder
from longspan.report import EXACT, crossover, milliseconds, times

Times = Mapping[str, Mapping[int, float]]
MIN_REPEATS = 3


@dataclass(frozen=True)
class Plan:
    """Which lengths, and for how many seconds: in all, for one pass, for repeats per length."""

    lengths: Sequence[int]
    budget: float
    patience: float
    column: float


def run_timing(
    methods: Sequence[str], plan: Plan, recorder: Recorder, console: Console, device: str
) -> None:
    """Fill one live table for inference and one for training, then say who wins from where."""
    end = time.perf_counter() + plan.budget
    for number, mode in enumerate(MODES):
        left = end - time.perf_counter()
        _fill(mode, left / (len(MODES) - number), methods, plan, recorder, console, device)
    console.print(f"\nFrom this many tokens on, a method beats exact attention ({EXACT}):")
    console.print(crossover_table(recorder, methods))


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


def affordable(measured: Times, length: int, *, patience: float, left: float) -> dict[str, float]:
    """Predicted seconds of one pass, for the methods that may run at `length`.

    Left out are those that need more than `patience` for a pass and, slowest first, as many more
    as it takes to finish within the `left` seconds.
    """
    predicted = {method: predict(seconds, length) for method, seconds in measured.items()}
    chosen = {method: t for method, t in predicted.items() if t <= patience}
    while chosen and sum(chosen.values()) * (1 + MIN_REPEATS) > left:
        del chosen[max(chosen, key=chosen.__getitem__)]
    return chosen


def crossover_table(recorder: Recorder, methods: Sequence[str]) -> Table:
    """From which length each method is faster than exact attention, by mode."""
    table = Table()
    table.add_column("method", no_wrap=True)
    by_mode = {mode: times(recorder.rows, mode) for mode in MODES}
    for mode in by_mode:
        table.add_column(mode)
    for method in methods:
        if method == EXACT:
            continue
        points = [
            crossover(measured.get(EXACT, {}), measured.get(method, {}))
            for measured in by_mode.values()
        ]
        table.add_row(method, *("not measured" if p is None else str(p) for p in points))
    return table


class _Board:
    """The live table of one mode: rows are methods, columns are lengths."""

    def __init__(self, methods: Sequence[str], lengths: Sequence[int]) -> None:
        self.methods, self.lengths = methods, lengths
        self.cells: dict[tuple[str, int], str] = {}

    def __rich__(self) -> Table:
        table = Table()
        table.add_column("method", no_wrap=True)
        for length in self.lengths:
            table.add_column(f"{length:,}", justify="right", min_width=7)
        for method in self.methods:
            table.add_row(method, *(self.cells.get((method, n), "") for n in self.lengths))
        return table


def _fill(
    mode: str,
    budget: float,
    methods: Sequence[str],
    plan: Plan,
    recorder: Recorder,
    console: Console,
    device: str,
) -> None:
    end = time.perf_counter() + budget
    console.print(f"\nMilliseconds, {mode} (batch 1, 8 heads of 64, float32, {device})")
    board = _Board(methods, plan.lengths)
    running: dict[str, dict[int, float]] = {method: {} for method in methods}

    # Without auto-refresh no drawing thread competes with what is being timed.
    with Live(board, console=console, auto_refresh=False) as live:
        for length in plan.lengths:
            if length != plan.lengths[0]:
                left = end - time.perf_counter()
                chosen = affordable(running, length, patience=plan.patience, left=left)
                for method in running.keys() - chosen.keys():
                    _stop(method, predict(running.pop(method), length), mode, length, recorder)
                    board.cells[method, length] = "[dim]stopped[/]"
            board.cells.update({(method, length): "[dim]…[/]" for method in running})
            live.refresh()
            cases = {method: Case(method, length, device=device) for method in running}

            def show(timings: Mapping[str, Timing], length: int = length) -> None:
                for method, timing in timings.items():
                    board.cells[method, length] = milliseconds(timing.seconds)
                live.refresh()

            timings = measure(
                {method: case.build(mode) for method, case in cases.items()},
                budget=plan.column,
                min_repeats=MIN_REPEATS,
                device=device,
                on_round=show,
            )
            for method, timing in timings.items():
                running[method][length] = timing.seconds
                recorder.add(timing_row(cases[method], mode, timing))
    if not console.is_terminal:
        console.line()  # a live display ends its line on terminals alone


def _stop(method: str, predicted: float, mode: str, length: int, recorder: Recorder) -> None:
    row = {"kind": "stopped", "mode": mode, "method": method, "length": length}
    recorder.add({**row, "predicted": predicted})
