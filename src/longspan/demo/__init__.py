"""The demo: what long attention costs on this machine, what it learns, and a page of both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

import longspan
from longspan.attention.methods import find
from longspan.demo.recorder import Recorder
from longspan.demo.timing import Plan, run_timing
from longspan.demo.training import Recipe, run_training
from longspan.doctor import devices
from longspan.report import EXACT, write_page
from longspan.report.summary import summary

INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C

INTRODUCTION = """\
Exact attention compares every token with every other, so twice the length costs four times as \
much; the other methods approximate it at a cost that grows (nearly) in step with the length. \
First this demo times them all over growing length, then it trains a small model with each on a \
task that needs long range; it takes about {time}."""

TIMING = Plan(lengths=(512, 1024, 2048, 4096, 8192, 16384), budget=85.0, patience=3.0, column=2.0)
QUICK_TIMING = Plan(lengths=(128, 256, 512), budget=8.0, patience=1.0, column=0.1)

TRAINED = ("softmax", "yoso", "nystrom", "linformer", "window")


def recipe(length: int, **sizes: Any) -> Recipe:
    """Sizes of the training run, with the options that documents of `length` tokens ask for."""
    options: dict[str, dict[str, Any]] = {
        # Topics are few and far apart, so short codes tell them apart, and collide often enough
        # for a sample of 16 to carry a gradient from the first step on.
        "yoso": {"num_hashes": 16, "hash_bits": 4},
        "linformer": {"max_length": length, "projected_length": 128, "projection": "convolution"},
    }
    return Recipe(length=length, options=options, **sizes)


TRAINING = recipe(4096, batch=4, steps=60, num_checks=5, held_out=32, budget=140.0)
QUICK_TRAINING = recipe(256, batch=4, steps=6, num_checks=2, held_out=8, budget=10.0)


def run(
    output: Path,
    *,
    methods: Sequence[str] | None = None,
    quick: bool = False,
    seed: int = 0,
    device: str = "cpu",
    command: str = "longspan demo",
    console: Console | None = None,
) -> int:
    """Run the demo, write rows and page into the folder `output`, return an exit code.

    Ctrl-C stops it with the rows so far and a page drawn from them, and gives code 130.
    """
    console = console or Console()
    methods = choose(methods or [])
    recorder = Recorder(output / "rows.jsonl")
    recorder.add({"kind": "run", "command": command, "seed": seed, "quick": quick})
    console.print(INTRODUCTION.format(time="ten seconds" if quick else "three minutes"))
    start = time.perf_counter()
    code = 0
    try:
        _time(methods, recorder, console, QUICK_TIMING if quick else TIMING, device)
        _train(methods, recorder, console, QUICK_TRAINING if quick else TRAINING, seed, device)
        recorder.add({"kind": "end", "seconds": time.perf_counter() - start})
    except KeyboardInterrupt:
        console.print("\nStopped by Ctrl-C: what was measured so far is kept.")
        code = INTERRUPTED
    _finish(recorder, output / "index.html", console)
    return code


def choose(wanted: Sequence[str]) -> list[str]:
    """The methods to run, in the order of METHODS: all, or those wanted beside exact attention.

    Raises `ValueError` for an unknown one.
    """
    for method in wanted:
        find(method)
    return [m for m in longspan.METHODS if not wanted or m in {EXACT, *wanted}]


def check_device(device: str) -> None:
    """Raise `ValueError` unless torch can compute on `device` here."""
    here = devices()
    if device not in here and f"{device}:0" not in here:
        raise ValueError(f"device must be one of {', '.join(here)}, got {device!r}")


def _time(
    methods: Sequence[str], recorder: Recorder, console: Console, plan: Plan, device: str
) -> None:
    console.print("\n[bold]1. Time over growing length[/]")
    console.print(
        "A method is stopped where its next length would take too long. Numbers are medians of "
        "interleaved runs."
    )
    run_timing(methods, plan, recorder, console, device)


def _train(
    methods: Sequence[str],
    recorder: Recorder,
    console: Console,
    recipe: Recipe,
    seed: int,
    device: str,
) -> None:
    trained = [method for method in TRAINED if method in methods]
    left_out = [method for method in methods if method not in TRAINED]
    console.print("\n[bold]2. Training on a task that needs long range[/]")
    console.print(
        f"{recipe.description} Every method gets the same {recipe.steps} batches of "
        f"{recipe.batch} documents and the same model around it."
    )
    if left_out:
        console.print(f"Left out to keep it short: {', '.join(left_out)}.")
    console.print()
    run_training(trained, recipe, recorder, console, seed=seed, device=device)


def _finish(recorder: Recorder, page: Path, console: Console) -> None:
    sentences = summary(recorder.rows)
    if sentences:
        console.print("\n[bold]In short[/]")
    for sentence in sentences:
        console.print(f"• {sentence}", highlight=False)
    console.print(f"\nRows: {recorder.path.resolve()}", soft_wrap=True, highlight=False)
    try:
        write_page(recorder.rows, page)
    except ModuleNotFoundError as error:
        how = escape("pip install 'longspan[report]'")
        console.print(f"No page, for {error.name} is missing: {how} brings it.", soft_wrap=True)
    else:
        console.print(f"Page: {page.resolve()}", soft_wrap=True, highlight=False)
