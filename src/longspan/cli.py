"""The command line: `longspan demo`, `train`, `sweep`, `tokenize`, `methods`, …."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import longspan
from longspan import advice, records
from longspan import demo as demonstration
from longspan import doctor as diagnosis
from longspan.bench.suite import Setting
from longspan.bench.suite import run as run_groups
from longspan.bench.suites import SUITES, default_device, plan
from longspan.report import milliseconds, read_rows, write_report

BAD_INPUT = 2
_ROWS = Path("longspan-bench/rows.jsonl")
_ADVICE = Path("longspan-bench/advice.jsonl")
_FILES = f"Files of `longspan bench`, `demo` or `train`; by default {_ROWS}."
_SUITES = "; ".join(f"{name}: {suite.summary}" for name, suite in SUITES.items())

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(longspan.__version__)
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which it is.")
    ] = False,
) -> None:
    """Attention over long sequences at linear cost."""


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, a few seconds.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and documents.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the page and its rows.")] = Path(
        "longspan-demo"
    ),
    method: Annotated[
        list[str] | None, typer.Option(help="Only this method and softmax; repeat for more.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, …")] = "cpu",
) -> None:
    """Time every method over growing length, train a small model with each, draw a page."""
    with _user_input():
        methods = demonstration.choose(method or [])
        demonstration.check_device(device)
        output.mkdir(parents=True, exist_ok=True)
    code = demonstration.run(
        output, methods=methods, quick=quick, seed=seed, device=device, command=records.command()
    )
    raise typer.Exit(code)


@app.command()
def train(
    task: Annotated[str, typer.Argument(help="mlm, glue/rte, lra/listops, …; `longspan tasks`.")],
    method: Annotated[str, typer.Option(help="A method; `longspan methods` lists them.")] = "yoso",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="name=value: an option of the method, or anything about the "
            "recipe, the model or the data; repeat for more.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the data, or hf:NAME of Hugging Face.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder of checkpoints, rows and the trained model.")
    ] = Path("longspan-train"),
    size: Annotated[
        str | None, typer.Option(help="tiny, small (4 × 512) or base (12 × 768).")
    ] = None,
    length: Annotated[int | None, typer.Option(min=8, help="Tokens of a sequence.")] = None,
    protocol: Annotated[
        str | None, typer.Option(help="Of lra/…: longspan (default), wisconsin or google.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="Start from the trained model in this folder.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of weights, order and masks; 0 by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last whole checkpoint in --output.")
    ] = False,
    eval_only: Annotated[
        bool, typer.Option("--eval-only", help="Only score the model in --output.")
    ] = False,
    keep_best: Annotated[
        bool, typer.Option("--keep-best", help="End with the weights of the best evaluation.")
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which to stop with a checkpoint.")
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard's files to --output.")
    ] = False,
) -> None:
    """Train a model with a method on a task, on transformers' Trainer."""
    training = _training()
    with _user_input():
        outcome = training.train(
            task, method, settings or [], data_dir=data_dir, output=output, size=size,
            length=length, protocol=protocol, start=start, seed=seed, resume=resume,
            eval_only=eval_only, keep_best=keep_best, time_limit=time_limit,
            tensorboard=tensorboard,
        )  # fmt: skip
    raise typer.Exit(outcome)


@app.command()
def arena(
    task: Annotated[
        list[str] | None, typer.Option(help="lra/listops, …; repeat for more (default: all five).")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="A method; repeat for more (default: six of them).")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, with seeds 0, 1, …")] = 1,
    protocol: Annotated[str, typer.Option(help="longspan, wisconsin or google.")] = "longspan",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value for every run, as in `train`.")
    ] = None,
    data_dir: Annotated[Path, typer.Option(help="Folder of the data.")] = Path("data"),
    output: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("longspan-arena"),
    rows: Annotated[
        Path | None, typer.Option(help="File that finished runs are added to, and skipped by.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs side by side.")] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which all runs stop with a checkpoint.")
    ] = None,
) -> None:
    """Train every method on every task of the Long Range Arena; the same command continues."""
    training = _training()
    with _user_input():
        left = training.arena(
            task, method, settings or [], seeds=seeds, protocol=protocol, data_dir=data_dir,
            output=output, rows=rows, jobs=jobs, time_limit=time_limit,
        )  # fmt: skip
    raise typer.Exit(1 if left else 0)


@app.command()
def sweep(
    task: Annotated[str, typer.Argument(help="As in `longspan train`.")],
    data_dir: Annotated[Path, typer.Option(help="Folder of the data, or hf:NAME.")],
    method: Annotated[list[str] | None, typer.Option(help="Repeat for more; yoso if none.")] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            help="name=value,value,…: num_hashes=8,32 or sharing=headwise,layerwise; "
            "repeat for all combinations."
        ),
    ] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Vary learning rates and batches as the papers do.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="As in `longspan train`, for all.")
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder of all runs, rows.jsonl and table.md.")
    ] = Path("longspan-sweep"),
    size: Annotated[str | None, typer.Option(help="tiny, small or base.")] = None,
    length: Annotated[int | None, typer.Option(min=8, help="Tokens of a sequence.")] = None,
    start: Annotated[Path | None, typer.Option(help="Start from this trained model.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, 0, 1, …; medians.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side.")] = 1,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds; the same command continues later.")
    ] = None,
) -> None:
    """Train a task for every combination of settings: ablations, and grids with medians."""
    training = _training()
    with _user_input():
        code = training.sweep(
            task, method or ["yoso"], vary or [], settings or [], data_dir=data_dir,
            output=output, size=size, length=length, start=start, seeds=seeds, grid=grid,
            jobs=jobs, time_limit=time_limit,
        )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def tokenize(
    sources: Annotated[
        list[str], typer.Argument(help="Parquet or text files, folders of them, or hf:NAME.")
    ],
    output: Annotated[Path, typer.Option(help="Folder to make, for `train mlm --data-dir`.")],
    vocab_size: Annotated[int, typer.Option(min=100, help="Of a tokenizer to train.")] = 16_384,
    tokenizer: Annotated[
        str | None, typer.Option(help="Take this one: tokenizer.json, vocab.txt, a hub's name.")
    ] = None,
    column: Annotated[str, typer.Option(help="The parquet column of the text.")] = "text",
) -> None:
    """Tokenize a corpus once, with a tokenizer trained on it or a given one."""
    training = _training()
    with _user_input():
        training.tokenize(
            sources, output, vocab_size=vocab_size, tokenizer=tokenizer, column=column
        )


@app.command()
def tasks() -> None:
    """List the tasks that `longspan train` knows, with the number that is best."""
    table = Table()
    for column in ("task", "what it is", "best by"):
        table.add_column(column)
    for name, row in _training().TASKS.items():
        table.add_row(f"[bold]{name}[/]", row.summary, row.best.removeprefix("-"))
    Console().print(table)


@app.command()
def methods() -> None:
    """List the methods: cost, paper, and options with their defaults."""
    table = Table(show_lines=True)
    for column in ("method", "cost", "what it does", "options"):
        table.add_column(column, no_wrap=column == "method", overflow="fold")
    for name, row in longspan.METHODS.items():
        about = f"{row.summary} [dim]arXiv {row.paper}[/]"
        table.add_row(f"[bold]{name}[/]", row.cost, about, _options(row.function))
    console = Console()
    console.print(table)
    example = 'longspan.attention(q, k, v, method="yoso", num_hashes=32)'
    console.print(f"Use: {example}, with q, k and v of shape (B, H, N, D).", soft_wrap=True)


@app.command()
def doctor() -> None:
    """Say what this machine can run, and why not."""
    console = Console()
    for title, lines in diagnosis.examine().items():
        console.print(f"[bold]{title}[/]")
        for line in lines:
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)


@app.command()
def bench(
    suites: Annotated[list[str], typer.Argument(metavar="SUITE…", help=_SUITES)],
    output: Annotated[Path, typer.Option("-o", "--output", help="File of the rows.")] = _ROWS,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer lengths, fewer repeats.")] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, …; by default a GPU where torch sees one.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of inputs and weights.")] = 0,
    length: Annotated[
        list[int] | None, typer.Option(help="Only this many tokens; repeat for more.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only names that begin so, and softmax.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Encoder whose queries and keys are looked at.")
    ] = None,
    text: Annotated[str | None, typer.Option(help="File that encoder reads.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what the file holds.")
    ] = False,
) -> None:
    """Measure one or more suites; a run that was stopped goes on where it was."""
    place = device or default_device()
    setting = Setting(place, quick, seed, tuple(length or ()), model, text)
    console = Console()
    with _user_input():
        groups = plan(suites, setting)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    try:
        run_groups(
            groups,
            output,
            setting,
            only=only or (),
            fresh=fresh,
            command=records.command(),
            say=say,
        )
    except KeyboardInterrupt:
        console.print("Stopped by Ctrl-C: rows so far are kept; the same command goes on.")
        raise typer.Exit(demonstration.INTERRUPTED) from None
    console.print(f"Draw them with: longspan report {output}", highlight=False)


@app.command()
def report(
    rows: Annotated[list[Path] | None, typer.Argument(metavar="ROWS…", help=_FILES)] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder of the page and its pictures.")
    ] = None,
    pictures: Annotated[bool, typer.Option(help="Also draw each chart as PNG and SVG.")] = True,
) -> None:
    """Draw rows as one page that works offline, and its charts as pictures."""
    files = rows or [_ROWS]
    folder = output or files[0].parent
    console = Console()
    with _user_input():
        made, problems = write_report(files, folder, pictures=pictures)
    for problem in problems:
        console.print(f"Left out: {problem}", markup=False, highlight=False, soft_wrap=True)
    for line in made:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@app.command()
def advise(
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")],
    heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Channels of a head.")] = 64,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    train: Annotated[bool, typer.Option("--train", help="Forward and backward.")] = False,
    model: Annotated[str | None, typer.Option(help="Encoder to take errors from.")] = None,
    text: Annotated[str | None, typer.Option(help="File that encoder reads.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, …; by default a GPU where torch sees one.")
    ] = None,
    rows: Annotated[
        list[Path] | None, typer.Option(help="Answer from these rows; nothing is measured.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="File of the rows.")] = _ADVICE,
) -> None:
    """Say which method pays at a length, from which length on, and at what error."""
    console = Console()
    question = advice.Question(length, heads, head_dim, dtype, train)
    place = device or default_device()
    tell = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with _user_input():
        setting = Setting(place, model=model, text=text)
        if rows:
            found, problems = read_rows(rows)
            for problem in problems:
                tell(problem)
            answer = advice.advise(question, found)
        elif setting.cuda and "cuda:0" not in diagnosis.devices():
            tell(advice.from_table(question, setting.device))
            return
        else:
            question = replace(question, dtype=dtype or setting.dtype, device=setting.device)
            found = advice.measured(question, setting, output, command=records.command(), say=tell)
            answer = advice.advise(question, found)
    console.print(_advice_table(answer))
    tell(answer.sentence)
    tell(f"In code: {answer.call}")


def _advice_table(answer: advice.Advice) -> Table:
    table = Table()
    for column in ("method", "ms a sequence", "× as fast as exact", "faster from", "error"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for option in answer.options:
        table.add_row(
            option.name,
            f"{'≈ ' * option.extrapolated}{milliseconds(option.seconds)}",
            f"{option.ratio:.2f}",
            str(option.crossover or "–"),
            "–" if option.error is None else f"{option.error:.0%}",
        )
    return table


def main() -> None:
    """The entry point of `longspan`."""
    app()


def _training() -> ModuleType:
    """The commands of training, which need more than torch."""
    try:
        return importlib.import_module("longspan.training.commands")
    except ModuleNotFoundError as error:
        message = f"longspan: training needs {error.name}: pip install 'longspan[train]'"
        Console(stderr=True).print(escape(message), soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from None


@contextmanager
def _user_input() -> Iterator[None]:
    """Around checks of what the user typed: one sentence and exit code 2 instead of a traceback."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        Console(stderr=True).print(f"longspan: {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(BAD_INPUT) from None


def _options(function: Callable[..., object]) -> str:
    """Options as they are written in a call; without a default where one must be given."""
    parameters = list(inspect.signature(function).parameters.values())[3:]
    shown = [
        p.name if p.default is p.empty else f"{p.name}={p.default!r}"
        for p in parameters
        if p.name != "key_mask"
    ]
    return escape(", ".join(shown))
