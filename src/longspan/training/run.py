"""One run: task and method in, a trained model and rows out."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from rich.console import Console

from longspan import records
from longspan.huggingface import extend_positions
from longspan.models import LongspanConfig
from longspan.tasks.base import Data, Task
from longspan.training.callbacks import Journal, Stop, Watch, numbers
from longspan.training.recipes import Recipe
from longspan.training.trainer import JOURNAL, LongspanTrainer, Rows, arguments, last_checkpoint

TOKENIZER = "tokenizer.json"
STOPPED = "stopped"
FINISHED = "finished"


@dataclass(frozen=True)
class Run:
    """What to train, from what, and where to.

    Args:
        task: a row of TASKS.
        method: a key of METHODS.
        recipe: how.
        data_dir: folder of the task's data, as the task reads it.
        output: folder of checkpoints, the trained `model`, `rows.jsonl` and TensorBoard's files.
        seed: of weights, order and masks.
        start: folder of a trained model to start from; positions are extended to the recipe's
            length, the optimizer is fresh.
        rows: file that rows go to, `output/rows.jsonl` unless given.
        labels: further fields of every row.
        keep_best: score and save the weights of the best evaluation instead of the last.
        save_model: whether the trained model is written to `output/model`.
        tensorboard: whether to write TensorBoard's files.
    """

    task: Task
    method: str
    recipe: Recipe
    data_dir: Path
    output: Path
    seed: int = 0
    start: Path | None = None
    rows: Path | None = None
    labels: dict[str, Any] | None = None
    keep_best: bool = False
    save_model: bool = True
    tensorboard: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "finished" with its row, or "stopped" and why."""

    status: str
    row: dict[str, Any] | None = None
    reason: str | None = None
    signal: int | None = None
    step: int = 0


def train(
    run: Run,
    *,
    resume: bool = False,
    eval_only: bool = False,
    time_limit: float | None = None,
    console: Console | None = None,
) -> Outcome:
    """Train, score and record; with `resume` from the last whole checkpoint, if there is one."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    state = PartialState()
    console = console or Console(quiet=not state.is_main_process)
    device = state.device
    with state.main_process_first():  # who prepares files that all then read
        data = _load(run, device)
    _check_output(run, resume or eval_only)
    made = arguments(run.recipe, data, run.output, run.seed, _reporters(run))
    transformers.set_seed(run.seed)
    model = build_model(run, data, trained=run.output / "model" if eval_only else None)
    best = run.output / "best"
    journal = Journal(
        run.task.best,
        run.recipe.patience,
        keep=(lambda: trainer.save_model(str(best))) if run.keep_best else None,
    )
    stop = Stop(time_limit)
    title = f"{run.task.name} {run.method}"
    watch = Watch(title, run.recipe.batch * run.recipe.length, console)
    trainer = LongspanTrainer(
        run.task, data, model, made, journal, [stop, watch], graph=run.recipe.graph
    )
    for noisy in (transformers.PrinterCallback, transformers.ProgressCallback):
        trainer.remove_callback(noisy)
    if not eval_only:
        checkpoint = last_checkpoint(run.output) if resume else None
        if checkpoint is not None:
            journal.restore(json.loads((checkpoint / JOURNAL).read_text()))
            console.print(f"{title}: continuing from {checkpoint}", soft_wrap=True)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        if stop.reason and trainer.state.global_step < trainer.state.max_steps:
            return Outcome(STOPPED, None, stop.reason, stop.signal, trainer.state.global_step)
        if run.keep_best and best.exists():
            trainer._load_from_checkpoint(str(best))
    row = _score(run, data, trainer, journal, console, eval_only)
    if run.save_model and not eval_only:
        trainer.save_model(str(run.output / "model"))
        if data.tokenizer is not None and state.is_main_process:
            data.tokenizer.save_pretrained(str(run.output / "model"))
    return Outcome(FINISHED, row, step=trainer.state.global_step)


def _load(run: Run, device: torch.device) -> Data:
    """The data; a trained model to start from brings its tokenizer."""
    options = dict(run.recipe.data)
    asks = inspect.signature(run.task.load).parameters
    if run.start is not None and "tokenizer" in asks and (run.start / TOKENIZER).is_file():
        options.setdefault("tokenizer", str(run.start))
    return run.task.load(run.data_dir, length=run.recipe.length, device=device, **options)


def build_model(run: Run, data: Data, trained: Path | None = None) -> Any:
    """The model of a run: fresh, from `run.start` (longer if need be), or as `trained`."""
    if trained is not None:
        return run.task.model.from_pretrained(trained)
    fields = {**run.recipe.config, **data.config}
    if run.start is None:
        config = LongspanConfig(method=run.method, options=run.recipe.options, **fields)
        return run.task.model(config)
    if not (run.start / "config.json").is_file():
        raise FileNotFoundError(
            f"start must be the folder of a trained model (with config.json), got {run.start}"
        )
    config = LongspanConfig.from_pretrained(run.start)
    if config.method != run.method:
        raise ValueError(f"method must be that of {run.start} ({config.method}), got {run.method}")
    if "vocab_size" in data.config and data.config["vocab_size"] != config.vocab_size:
        raise ValueError(
            f"tokenizer must have the {config.vocab_size} entries of the model in {run.start}, "
            f"got {data.config['vocab_size']}"
        )
    config.num_labels = data.config.get("num_labels", config.num_labels)
    config.options = {**config.options, **run.recipe.options}
    model = run.task.model.from_pretrained(run.start, config=config)
    if config.positions == "learned" and run.recipe.length > config.max_position_embeddings:
        extend_positions(model, run.recipe.length)
    return model


def _score(
    run: Run,
    data: Data,
    trainer: LongspanTrainer,
    journal: Journal,
    console: Console,
    eval_only: bool,
) -> dict[str, Any]:
    """Evaluate every split and append one row."""
    curve, best, step = list(journal.curve), journal.value, journal.step
    metrics: dict[str, dict[str, float]] = {}
    steps = trainer.state.global_step
    for number, (name, examples) in enumerate(data.evaluation.items()):
        if number == 0 and not run.keep_best and curve and curve[-1]["step"] == steps:
            metrics[name] = {key: value for key, value in curve[-1].items() if key != "step"}
        else:
            metrics[name] = numbers(trainer.evaluate(Rows(examples)))
    tokens = round(steps * run.recipe.batch * (data.tokens or run.recipe.length))
    row = {
        "kind": "evaluation" if eval_only else "training",
        "task": run.task.name,
        "method": run.method,
        "options": dict(trainer.model.config.options),
        "seed": run.seed,
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "steps": steps,
        "tokens": tokens,
        "seconds": journal.seconds,
        "tokens_per_second": tokens / journal.seconds if journal.seconds else None,
        "metrics": metrics,
        "curve": curve,
        "best": {"metric": run.task.best.removeprefix("-"), "value": best, "step": step},
        "recipe": asdict(run.recipe),
        "start": None if run.start is None else run.start.name,
        "processes": trainer.args.world_size,
        **(run.labels or {}),
    }  # fmt: skip
    if trainer.is_world_process_zero():
        records.append(run.rows or run.output / "rows.jsonl", row)
    return row


def _check_output(run: Run, known: bool) -> None:
    """A folder with checkpoints of another run is not written over by accident."""
    if not known and last_checkpoint(run.output) is not None:
        raise FileExistsError(
            f"output must be a new folder, or give --resume to continue, got {run.output}, which "
            f"has {last_checkpoint(run.output)}"
        )


def _reporters(run: Run) -> list[str]:
    return ["tensorboard"] if run.tensorboard else []
