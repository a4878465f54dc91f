"""The study: methods trained equally from scratch, continued at a greater length, fine-tuned.

    python -m longspan.training.study --data-dir D --work W --output O --jobs 5 --time-limit 520

The same data, steps, batches, learning rates and seeds for every method. A second call with the
same folders continues where a time limit stopped the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from longspan.attention import checks
from longspan.tasks import find
from longspan.training import settings
from longspan.training.jobs import Job, collect, execute
from longspan.training.recipes import SIZES, Recipe, size
from longspan.training.tables import study_table

VARIANTS = (
    "softmax",
    "yoso-32=yoso:num_hashes=32,hash_bits=9,exact_below=0",
    "yoso-E=yoso_expectation:hash_bits=9",
    "nystrom-64=nystrom:num_landmarks=64,conv_kernel=33",
    "linformer-256=linformer:projected_length=256",
)
NEVER = 10**9  # steps
# Passes over the training rows, and rows a step: small sets want more passes. The longest first.
FINE_TUNING: dict[str, tuple[float, int]] = {
    "imdb": (2, 32),
    "glue/sst2": (2, 64),
    "glue/cola": (4, 32),
    "glue/stsb": (5, 32),
    "glue/mrpc": (5, 32),
    "glue/rte": (5, 32),
}


@dataclass(frozen=True)
class Variant:
    """A method with its options, under a name."""

    name: str
    method: str
    options: dict[str, object]


def variant(text: str) -> Variant:
    """`name=method:option=value,…`, or a method's name alone."""
    name, _, rest = text.partition("=") if ":" in text else (text, "", text)
    method, _, options = rest.partition(":")
    return Variant(name, method, settings.parse(options.split(",") if options else []))


def plan(
    variants: Sequence[Variant],
    data_dir: Path,
    *,
    model_size: str = "small",
    length: int = 512,
    long_length: int = 4096,
    steps: int = 6000,
    long_steps: int = 600,
    batch: int = 16,
    learning_rate: float = 1e-3,
    tasks: Sequence[str] = tuple(FINE_TUNING),
    fine_rate: float = 1e-4,
    seeds: int = 1,
    evaluation_rows: int = 0,
    side_by_side: int = 1,
    graph: bool = False,
    given: Sequence[str] = (),
) -> list[Job]:
    """All runs: `mlm` at `length`, on from there at `long_length`, and every task from the first.

    A task with a length, as `imdb@4096`, starts from the longer model where it needs one.

    Pre-training is pre-norm, with rotary positions, at a high rate and without dropout, for minutes
    where the papers' recipes are for days; settings `given` change it at the first length. IMDB,
    the longest, has one seed whatever `seeds` says.
    """
    pretraining = Recipe(
        length=length,
        batch=batch,
        learning_rate=learning_rate,
        steps=steps,
        warmup=0.1,
        adam_beta2=0.98,
        evaluate_every=max(1, steps // 4),
        # With learned positions a model spends its first thousands of steps on finding out what is
        # next to what.
        config=dict(
            size(model_size),
            max_position_embeddings=length,
            norm="pre",
            positions="rotary",
            hidden_dropout_prob=0.0,
        ),
        data={"evaluation_rows": evaluation_rows},
        graph=graph,
    )
    longer = Recipe(
        length=long_length,
        batch=max(1, batch * length // long_length),
        learning_rate=learning_rate / 3,
        steps=long_steps,
        warmup=0.1,
        adam_beta2=0.98,
        data={"evaluation_rows": evaluation_rows * length // long_length},
        graph=graph,
    )
    pretrained, lengthened, tuned = [], [], []
    for it in variants:
        labels = {"variant": it.name, "side_by_side": side_by_side}
        first, second = f"{it.name}-mlm-{length}", f"{it.name}-mlm-{long_length}"
        recipe = pretraining.changed(options=it.options)
        recipe = settings.apply(recipe, find("mlm"), it.method, settings.parse(given))
        pretrained.append(
            Job(first, "mlm", it.method, recipe, data_dir / "corpus", labels=labels,
                save_model=True)
        )  # fmt: skip
        if long_steps:
            lengthened.append(
                Job(second, "mlm", it.method, longer, data_dir / "corpus", needs=first,
                    labels=labels, save_model=True)
            )  # fmt: skip
    for named in tasks:
        task, _, at = named.partition("@")
        checks.choice("tasks", task, FINE_TUNING)
        epochs, rows = FINE_TUNING[task]
        fine = Recipe(
            length=int(at) if at else min(length, 512 if task == "imdb" else 128),
            batch=rows,
            learning_rate=fine_rate,
            epochs=epochs,
            warmup=0.1,
            evaluate_every=NEVER if task == "imdb" else 0,  # it has but its test split
            config={"hidden_dropout_prob": 0.1},
            graph=graph,
        )
        tuned += [
            Job(f"{it.name}-{named.replace('/', '-')}-{seed}", task, it.method, fine, data_dir,
                seed, needs=f"{it.name}-mlm-{long_length if fine.length > length else length}",
                labels={"variant": it.name, "side_by_side": side_by_side})
            for seed in range(1 if task == "imdb" else seeds)
            for it in variants
        ]  # fmt: skip
    tuned.sort(key=lambda job: job.seed)  # every task before the next seed
    return [*pretrained, *lengthened, *tuned]


def main(
    data_dir: Annotated[
        Path, typer.Option(help="Folder with corpus/ (longspan tokenize), glue/ and imdb/.")
    ],
    work: Annotated[Path, typer.Option(help="Folder of checkpoints, models and logs.")],
    output: Annotated[Path, typer.Option(help="Folder of rows.jsonl and table.md.")],
    variants: Annotated[
        list[str] | None,
        typer.Option("--variant", help="name=method:option=value,…; repeat; five by default."),
    ] = None,
    model_size: Annotated[str, typer.Option("--size", help=" or ".join(SIZES))] = "small",
    length: Annotated[int, typer.Option(help="Tokens of a sequence at first.")] = 512,
    long_length: Annotated[int, typer.Option(help="And then.")] = 4096,
    steps: Annotated[int, typer.Option(help="Of pre-training at the first length.")] = 6000,
    long_steps: Annotated[int, typer.Option(help="At the second; 0 leaves it out.")] = 600,
    batch: Annotated[int, typer.Option(help="Sequences a step at the first length.")] = 16,
    tasks: Annotated[
        str, typer.Option(help="To fine-tune on, with commas, as imdb@4096; none for none.")
    ] = ",".join(FINE_TUNING),
    seeds: Annotated[int, typer.Option(help="Of fine-tuning on GLUE; tables show medians.")] = 1,
    epochs: Annotated[
        float, typer.Option(help="Scales the passes over the data in fine-tuning.")
    ] = 1.0,
    evaluation_rows: Annotated[
        int, typer.Option(help="Held-out rows that are scored, of the first length; 0 for all.")
    ] = 0,
    given: Annotated[
        list[str] | None,
        typer.Option("--set", help="name=value of pre-training at the first length; repeat."),
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Replay steps as CUDA graphs.")] = False,
    jobs: Annotated[int, typer.Option(help="Runs side by side.")] = 1,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which runs stop with a checkpoint.")
    ] = None,
) -> None:
    """Train methods equally from scratch, continue them at a greater length, fine-tune them."""
    chosen = [variant(text) for text in variants or VARIANTS]
    named = [] if tasks == "none" else tasks.split(",")
    planned = plan(
        chosen, data_dir, model_size=model_size, length=length, long_length=long_length,
        steps=steps, long_steps=long_steps, batch=batch, tasks=named, seeds=seeds,
        evaluation_rows=evaluation_rows, side_by_side=jobs, graph=graph, given=given or (),
    )  # fmt: skip
    planned = [_scaled(job, epochs) for job in planned]
    console = Console()
    left = execute(planned, work, workers=jobs, time_limit=time_limit, console=console)
    count = collect(planned, work, output / "rows.jsonl")
    (output / "table.md").write_text(study_table(output / "rows.jsonl"))
    console.print(f"{count} of {len(planned)} runs finished; rows and table in {output}")
    if left:
        console.print(f"Left: {', '.join(left)}. The same command continues.", soft_wrap=True)
        raise typer.Exit(1)


def _scaled(job: Job, epochs: float) -> Job:
    if not job.recipe.epochs:
        return job
    return replace(job, recipe=job.recipe.changed(epochs=job.recipe.epochs * epochs))


if __name__ == "__main__":
    typer.run(main)
