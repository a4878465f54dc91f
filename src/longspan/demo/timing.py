"""The demo's first part: every method over growing length, until it becomes too slow."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table

from longspan.bench import MODES, Case, Timing, affordable, measure, predict, timing_row
from longspan.demo.recorder import Recorder
from longspan.report import EXACT, crossover, milliseconds, times

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
                predicted = {m: predict(seconds, length) for m, seconds in running.items()}
                chosen = affordable(
                    predicted, patience=plan.patience, left=left, calls=1 + MIN_REPEATS
                )
                for method in running.keys() - chosen.keys():
                    del running[method]
                    _stop(method, predicted[method], mode, length, recorder)
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
