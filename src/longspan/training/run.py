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
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_NAME as WEIGHTS

from longspan import records
from longspan.huggingface import extend_positions
from longspan.models import LongspanConfig
from longspan.tasks.base import Data, Task
from longspan.training.callbacks import Journal, Stop, Watch, numbers
from longspan.training.recipes import Recipe
from longspan.training.trainer import LongspanTrainer, Rows, arguments, last_checkpoint

TOKENIZER = "tokenizer.json"
MODEL_FIELDS = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
RUN = "run.json"
ROWS = "rows.jsonl"
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
    save_model: bool = True
    tensorboard: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended: "finished" with its row, or "stopped" and why; `losses` as shown."""

    status: str
    row: dict[str, Any] | None = None
    reason: str | None = None
    signal: int | None = None
    step: int = 0
    losses: tuple[float, ...] = ()


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
    # Processes on CPUs are joined only if CPUs are asked for.
    state = PartialState(cpu=not torch.accelerator.is_available())
    console = console or Console(quiet=not state.is_main_process)
    device = state.device
    with state.main_process_first():  # who prepares files that all then read
        data = _load(run, device, eval_only)
    _check_output(run, resume or eval_only)
    made = arguments(run.recipe, data, run.output, run.seed, _reporters(run))
    transformers.set_seed(run.seed)
    model = build_model(run, data, trained=run.output / "model" if eval_only else None)
    best = run.output / "best"
    journal = Journal(
        run.task.best,
        run.recipe.patience,
        keep=(lambda: trainer.save_model(str(best))) if run.recipe.keep_best else None,
    )
    stop = Stop(time_limit)
    title = f"{run.task.name} {run.method}"
    watch = Watch(title, run.recipe.batch * (data.tokens or run.recipe.length), console)
    trainer = LongspanTrainer(
        run.task, data, model, made, journal, [stop, watch], graph=run.recipe.graph,
        one_cycle=run.recipe.schedule == "one_cycle",
    )  # fmt: skip
    for noisy in (transformers.PrinterCallback, transformers.ProgressCallback):
        trainer.remove_callback(noisy)
    if not eval_only:
        checkpoint = last_checkpoint(run.output) if resume else None
        if checkpoint is not None:
            _check_model(model, Path(checkpoint))
        if trainer.is_world_process_zero():
            _write_down(run)
        if checkpoint is not None:
            console.print(f"{title}: continuing from {checkpoint}", soft_wrap=True, highlight=False)
        with stop, watch:
            trainer.run(checkpoint)
        if stop.reason and trainer.state.global_step < trainer.state.max_steps:
            return Outcome(STOPPED, None, stop.reason, stop.signal, trainer.state.global_step)
        if run.recipe.keep_best and best.exists():
            trainer.load_model(best)
    metrics = _evaluate(run, data, trainer, journal, watch)
    if run.save_model and not eval_only:
        trainer.save_model(str(run.output / "model"))
        if data.tokenizer is not None and state.is_main_process:
            data.tokenizer.save_pretrained(str(run.output / "model"))
    # The row comes last: a run that has one has everything else.
    row = _row(run, data, trainer, journal, metrics, eval_only)
    if state.is_main_process:
        row = records.append(run.rows or run.output / ROWS, row)
    return Outcome(FINISHED, row, step=trainer.state.global_step, losses=tuple(journal.losses))


def _write_down(run: Run) -> None:
    """What the run was made of, beside its results."""
    about = {
        "task": run.task.name,
        "method": run.method,
        "recipe": asdict(run.recipe),
        "data_dir": str(run.data_dir),
        "seed": run.seed,
        "start": None if run.start is None else str(run.start),
        "settings": (run.labels or {}).get("settings", ""),
    }
    run.output.mkdir(parents=True, exist_ok=True)
    unfinished = run.output / f"{RUN}.part"
    unfinished.write_text(json.dumps(about, indent=1))
    unfinished.rename(run.output / RUN)


def written_down(output: Path) -> dict[str, Any]:
    """What the run in a folder was made of; an error where there is none."""
    if not (output / RUN).is_file():
        raise FileNotFoundError(f"output must be the folder of a run (with {RUN}), got {output}")
    about = json.loads((output / RUN).read_text())
    about["recipe"] = Recipe(**about["recipe"])
    return about


def _load(run: Run, device: torch.device, eval_only: bool) -> Data:
    """The data; a trained model brings its tokenizer."""
    options = dict(run.recipe.data)
    trained = run.output / "model" if eval_only else run.start
    if trained is not None and not (trained / "config.json").is_file():
        name = "output must be the folder of a finished run" if eval_only else (
            "start must be the folder of a trained model"
        )  # fmt: skip
        raise FileNotFoundError(f"{name}, {trained} with config.json, which is not there")
    asks = inspect.signature(run.task.load).parameters
    if trained is not None and "tokenizer" in asks and (trained / TOKENIZER).is_file():
        options.setdefault("tokenizer", str(trained))
    return run.task.load(run.data_dir, length=run.recipe.length, device=device, **options)


def build_model(run: Run, data: Data, trained: Path | None = None) -> Any:
    """The model of a run: fresh, from `run.start` (longer if need be), or as `trained`."""
    if trained is not None:
        return run.task.model.from_pretrained(trained)
    fields = {**run.recipe.config, **data.config}
    if run.start is None:
        config = LongspanConfig(method=run.method, options=run.recipe.options, **fields)
        return run.task.model(config)
    config = LongspanConfig.from_pretrained(run.start)
    if config.method != run.method:
        raise ValueError(f"method must be that of {run.start} ({config.method}), got {run.method}")
    if "vocab_size" in data.config and data.config["vocab_size"] != config.vocab_size:
        raise ValueError(
            f"tokenizer must have the {config.vocab_size} entries of the model in {run.start}, "
            f"got {data.config['vocab_size']}"
        )
    for name, value in {**data.config, **run.recipe.config}.items():
        setattr(config, name, value)
    config.options = {**config.options, **run.recipe.options}
    model = run.task.model.from_pretrained(run.start, config=config)
    if run.recipe.length > config.max_position_embeddings:
        extend_positions(model, run.recipe.length)
    return model


def _evaluate(
    run: Run, data: Data, trainer: LongspanTrainer, journal: Journal, watch: Watch
) -> dict[str, dict[str, float]]:
    """Score every split; the first was scored already where the last step was evaluated."""
    best = f", weights of step {journal.step}" if run.recipe.keep_best and journal.step else ""
    metrics: dict[str, dict[str, float]] = {}
    remembered = journal.state() if run.recipe.keep_best and journal.curve else None
    last = journal.curve[-1] if journal.curve else {}
    for name, examples in data.evaluation.items():
        if (
            not metrics
            and not run.recipe.keep_best
            and last.get("step") == trainer.state.global_step
        ):
            metrics[name] = {key: value for key, value in last.items() if key != "step"}
        else:
            watch.scored = f"{name}{best}"
            metrics[name] = numbers(trainer.evaluate(Rows(examples)))
        remembered = remembered or journal.state()
    journal.restore(remembered or {})
    return metrics


def _row(
    run: Run,
    data: Data,
    trainer: LongspanTrainer,
    journal: Journal,
    metrics: dict[str, dict[str, float]],
    eval_only: bool,
) -> dict[str, Any]:
    steps = trainer.state.global_step
    tokens = round(steps * run.recipe.batch * (data.tokens or run.recipe.length))
    return {
        "kind": "evaluation" if eval_only else "training",
        "task": run.task.name,
        "method": run.method,
        "options": dict(trainer.model.config.options),
        "seed": run.seed,
        "model": {name: getattr(trainer.model.config, name) for name in MODEL_FIELDS},
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "steps": steps,
        "tokens": tokens,
        "seconds": journal.seconds,
        "tokens_per_second": tokens / journal.seconds if journal.seconds else None,
        "metrics": metrics,
        "curve": journal.curve,
        "best": {"metric": run.task.best.removeprefix("-"), "value": journal.value,
                 "step": journal.step},
        "recipe": asdict(run.recipe),
        "start": None if run.start is None else run.start.name,
        "processes": trainer.args.world_size,
        "command": records.command(),
        **(run.labels or {}),
    }  # fmt: skip


def _check_output(run: Run, known: bool) -> None:
    """A folder with checkpoints or the model of another run is not written over by accident."""
    model = run.output / "model"
    left = last_checkpoint(run.output) or (model if model.exists() else None)
    if not known and left is not None:
        raise FileExistsError(
            f"output must be a new folder, or give --resume to continue, got {run.output}, which "
            f"has {left}"
        )


def _check_model(model: Any, checkpoint: Path) -> None:
    """A checkpoint is continued by the model that it is of, before anything is written."""
    if not (checkpoint / WEIGHTS).is_file():
        return  # in parts, one for each process
    with safe_open(checkpoint / WEIGHTS, "pt") as kept:
        shapes = {name: kept.get_slice(name).get_shape() for name in kept.keys()}  # noqa: SIM118
    for name, x in model.state_dict().items():
        if name in shapes and shapes[name] != list(x.shape):
            raise ValueError(
                f"settings and data must be those of {checkpoint}: its {name} has the shape "
                f"{tuple(shapes[name])}, got {tuple(x.shape)}"
            )


def _reporters(run: Run) -> list[str]:
    return ["tensorboard"] if run.tensorboard else []
