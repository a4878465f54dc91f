"""The wiring to `transformers.Trainer`, which owns loop, precision, processes, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from longspan.tasks.base import Batch, Data, Examples, Task
from longspan.training.callbacks import Journal
from longspan.training.graph import StepGraph
from longspan.training.recipes import Recipe

JOURNAL = "journal.json"  # written last: a checkpoint that has it is whole


class Rows(Dataset):
    """`Examples` as torch's loader takes them: a number says row and epoch, a list is a batch."""

    def __init__(self, examples: Examples) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitems__(self, numbers: Sequence[int]) -> Batch:
        """The batch of rows number modulo length, all of one epoch."""
        rows = len(self.examples)
        return self.examples.batch([n % rows for n in numbers], numbers[0] // rows)

    def __getitem__(self, number: int) -> Batch:
        return self.__getitems__([number])


class Shuffled(Sampler[int]):
    """Whole batches of rows, each at most once an epoch, in an order of seed and epoch alone.

    Where `lengths` of rows are given, those of so many batches are sorted by them before they are
    cut into batches, whose order is random again: batches then need little padding.
    """

    SORTED = 50  # batches

    def __init__(
        self, rows: int, batch: int, seed: int, lengths: Sequence[int] | None = None
    ) -> None:
        if batch > rows:
            raise ValueError(f"batch must be at most the {rows} rows to train on, got {batch}")
        self.rows, self.used, self.seed, self.epoch = rows, rows // batch * batch, seed, 0
        self.batch, self.lengths = batch, None if lengths is None else np.asarray(lengths)

    def __len__(self) -> int:
        return self.used

    def set_epoch(self, epoch: int) -> None:
        """Called by accelerate before each epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng((self.seed, self.epoch))
        order = rng.permutation(self.rows)[: self.used]
        if self.lengths is not None:
            lengths = self.lengths
            runs = np.split(order, range(0, self.used, self.SORTED * self.batch)[1:])
            order = np.concatenate([run[lengths[run].argsort(kind="stable")] for run in runs])
            order = rng.permutation(order.reshape(-1, self.batch)).reshape(-1)
        return iter((order + self.epoch * self.rows).tolist())


class LongspanTrainer(Trainer):
    """Trainer with our order of rows, batches made by the task, and checkpoints that are whole."""

    def __init__(
        self,
        task: Task,
        data: Data,
        model: Any,
        arguments: TrainingArguments,
        journal: Journal,
        callbacks: list[Any],
        graph: bool = False,
        one_cycle: bool = False,
    ) -> None:
        self.data, self.journal, self.one_cycle = data, journal, one_cycle
        self.graph = StepGraph(model.parameters()) if graph else None
        first = next(iter(data.evaluation.values()))

        def score(prediction: Any) -> dict[str, float]:
            return task.score(prediction.predictions, prediction.label_ids)

        super().__init__(
            model=model,
            args=arguments,
            data_collator=lambda batch: batch,
            train_dataset=Rows(data.train),
            eval_dataset=Rows(first),
            compute_metrics=score,
            preprocess_logits_for_metrics=task.keep,
            callbacks=[journal, *callbacks],
        )
        if self.is_fsdp_enabled and model.config.options.get("sharing") == "layerwise":
            # What all layers share cannot lie with one of them: the model is sharded as a whole.
            self.accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = []

    def run(self, checkpoint: Path | None) -> None:
        """Train to the end, from a checkpoint if there is one."""
        if checkpoint is None:
            self.train()
            return
        self.journal.restore(json.loads((checkpoint / JOURNAL).read_text()))
        step = int(checkpoint.name.partition("-")[2])
        args = self.args
        epoch = len(self.get_train_dataloader()) // args.gradient_accumulation_steps  # steps
        if step >= (args.max_steps if args.max_steps > 0 else args.num_train_epochs * epoch):
            # Trainer would make one more step.
            self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
            self._load_from_checkpoint(str(checkpoint))
            return
        # An evaluation that was due when the checkpoint was written, and had not been made.
        every = {"steps": args.eval_steps, "epoch": epoch}.get(args.eval_strategy.value)
        made = [point["step"] for point in self.journal.curve]
        args.eval_on_start = every is not None and step % every == 0 and step not in made
        self.train(resume_from_checkpoint=str(checkpoint))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As Trainer's, which does not know torch's `OneCycleLR`."""
        if not self.one_cycle:
            return super().create_scheduler(num_training_steps, optimizer)
        warmup = self.args.get_warmup_steps(num_training_steps)
        if not 2 <= warmup < num_training_steps:  # torch would divide by zero
            rule = f"from 2 to fewer than all {num_training_steps} steps with one_cycle"
            raise ValueError(f"warmup must be {rule}, got {warmup}")
        self.lr_scheduler = OneCycleLR(
            optimizer or self.optimizer, self.args.learning_rate, num_training_steps,
            pct_start=warmup / num_training_steps, anneal_strategy="linear",
        )  # fmt: skip
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As Trainer's; what training draws next does not depend on it."""
        with torch.random.fork_rng(devices=[]):  # torch's loader draws, our modules do not in eval
            return super().evaluate(*args, **kwargs)

    def _get_train_sampler(self, train_dataset: Any = None) -> Shuffled:
        parts = self.args.world_size * self.args.gradient_accumulation_steps
        batch = self.args.per_device_train_batch_size * parts
        return Shuffled(len(self.data.train), batch, self.args.seed, self.data.lengths)

    def training_step(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a batch, replayed where they are recorded."""

        def step(batch: Batch) -> torch.Tensor:
            # A backward in a thread of torch's own, as it is by default, keeps a GPU waiting.
            with torch.autograd.set_multithreading_enabled(False):
                return super(LongspanTrainer, self).training_step(model, batch, *args, **kwargs)

        return step(inputs) if self.graph is None else self.graph(step, inputs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's; where processes hold shards of it, the whole model, too."""
        if _internal_call or not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        weights = self.accelerator.get_state_dict(self.model)  # by all processes together
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def load_model(self, folder: Path) -> None:
        """Take the weights that `save_model` wrote."""
        if not self.is_fsdp_enabled:
            self._load_from_checkpoint(str(folder))
            return
        weights: dict[str, Any] = {}
        if self.args.should_save:
            weights |= load_file(folder / SAFE_WEIGHTS_NAME)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        set_model_state_dict(self.model, weights, options=options)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            unfinished = folder / f"{JOURNAL}.part"
            unfinished.write_text(json.dumps(self.journal.state()))
            unfinished.rename(folder / JOURNAL)


def last_checkpoint(folder: Path) -> Path | None:
    """The latest checkpoint that was written to its end, None where there is none."""
    whole = [path.parent for path in folder.glob(f"checkpoint-*/{JOURNAL}")]
    return max(whole, key=lambda path: int(path.name.partition("-")[2]), default=None)


def arguments(
    recipe: Recipe, data: Data, folder: Path, seed: int, report_to: list[str]
) -> TrainingArguments:
    """The recipe in Trainer's words."""
    on_gpu = torch.cuda.is_available()
    bf16 = recipe.precision == "bf16" or (
        recipe.precision == "auto" and on_gpu and torch.cuda.is_bf16_supported()
    )
    evaluate = ("steps" if recipe.evaluate_every else "epoch") if _during(recipe) else "no"
    made = TrainingArguments(
        output_dir=str(folder),
        seed=seed,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=recipe.accumulate,
        max_steps=recipe.steps or -1,
        num_train_epochs=recipe.epochs or 1.0,
        learning_rate=recipe.learning_rate,
        warmup_steps=recipe.warmup,
        lr_scheduler_type=_schedule(recipe),
        weight_decay=recipe.weight_decay,
        adam_beta2=recipe.adam_beta2,
        adam_epsilon=recipe.adam_epsilon,
        max_grad_norm=recipe.clip,
        use_cpu=not torch.accelerator.is_available(),
        bf16=bf16,
        torch_compile=recipe.compile,
        gradient_checkpointing=recipe.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        eval_strategy=evaluate,
        eval_steps=recipe.evaluate_every or None,
        save_strategy="steps" if recipe.save_every else "no",
        save_steps=recipe.save_every or 500,
        save_total_limit=2,  # while one is being written the other is whole
        logging_steps=recipe.log_every,
        logging_nan_inf_filter=False,  # it would make the host wait for every step
        report_to=report_to,
        remove_unused_columns=False,
        dataloader_pin_memory=on_gpu and not data.resident,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    parts = made.world_size * recipe.accumulate
    if recipe.batch % parts:
        raise ValueError(
            f"batch must be a multiple of processes × accumulate = {parts}, got {recipe.batch}"
        )
    made.per_device_train_batch_size = recipe.batch // parts
    made.per_device_eval_batch_size = (
        recipe.evaluation_batch or 2 * made.per_device_train_batch_size  # nothing is kept
    )
    if recipe.graph and (parts > 1 or made.device.type != "cuda"):
        raise ValueError(
            "graph must be false but for one process on an NVIDIA GPU without accumulation, got "
            f"{made.world_size} on {made.device.type} and accumulate = {recipe.accumulate}"
        )
    return made


def _during(recipe: Recipe) -> bool:
    """Whether there are evaluations before the end."""
    return bool(recipe.evaluate_every or recipe.epochs or recipe.patience)


def _schedule(recipe: Recipe) -> str:
    """Trainer's word for it; `create_scheduler` makes one that Trainer has no word for."""
    words = {"constant": "constant_with_warmup", "one_cycle": "linear"}
    return words.get(recipe.schedule, recipe.schedule)
