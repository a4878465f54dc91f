"""What watches a run: the progress line, the clock, the best weights, and a clean stop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

TIMES = ("runtime", "per_second", "preparation_time")
RANKS_AGREE_EVERY = 10  # steps
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_SIGNAL = 1.0  # seconds: `timeout` signals a process, and then its whole group


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """What a task scored, without what Trainer adds; numbers that are not finite are left out."""
    return {
        key.removeprefix("eval_"): float(value)
        for key, value in metrics.items()
        if key.startswith("eval_") and not key.endswith(TIMES) and math.isfinite(value)
    }


class Journal(TrainerCallback):
    """What a run must remember beyond its weights: time spent, the best evaluation, patience.

    Args:
        best: the number that decides, as in `Task.best`.
        patience: evaluations without improvement after which training stops; 0 never stops it.
        keep: called with no argument when an evaluation is the best so far.
    """

    def __init__(
        self, best: str, patience: int = 0, keep: Callable[[], object] | None = None
    ) -> None:
        self.best, self.patience, self.keep = best, patience, keep
        self.seconds = 0.0  # in training, over all interruptions; evaluations are not counted
        self.value: float | None = None
        self.step = 0
        self.waited = 0
        self.curve: list[dict[str, float]] = []  # every evaluation, with its step
        self.losses: list[float] = []  # of training, as they were shown since the run (re)started
        self.since: float | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, and `restore` takes."""
        return {
            "seconds": self.elapsed(), "value": self.value, "step": self.step,
            "waited": self.waited, "curve": list(self.curve),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)

    def elapsed(self) -> float:
        """Seconds of training up to now."""
        return self.seconds + (0.0 if self.since is None else time.perf_counter() - self.since)

    def pause(self) -> None:
        """Stop the clock; the next step starts it again."""
        self.seconds, self.since = self.elapsed(), None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Run while there are steps."""
        if self.since is None:
            self.since = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Keep the loss; without one there is nothing left to learn from."""
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise ValueError(
                f"the loss must stay finite, got {logs['loss']} at step {state.global_step}; "
                "a lower learning_rate or a longer warmup often helps"
            )
        self.losses.append(logs["loss"])

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop at the first batch of an evaluation."""
        if self.since is not None:
            self.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop."""
        self.pause()

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any
    ) -> None:
        """Compare with the best, and lose patience."""
        found = numbers(metrics)
        self.curve.append({"step": state.global_step, **found})
        value = found.get(self.best.removeprefix("-"))  # None where it was not finite
        sign = -1 if self.best.startswith("-") else 1
        if value is not None and (self.value is None or sign * value > sign * self.value):
            self.value, self.step, self.waited = value, state.global_step, 0
            if self.keep is not None:
                self.keep()
        else:
            self.waited += 1
            if self.patience and self.waited >= self.patience:
                control.should_training_stop = True


class Stop(TrainerCallback):
    """Ends a run after the step in hand, with a checkpoint: on SIGINT, SIGTERM or a time limit.

    Signals are listened to inside `with`.
    """

    def __init__(self, time_limit: float | None = None) -> None:
        self.deadline = None if time_limit is None else time.monotonic() + time_limit
        self.reason: str | None = None
        self.signal: int | None = None
        self.received = 0.0
        self.before: dict[int, Any] = {}

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self.reason = number, signal.Signals(number).name
            self.received = time.monotonic()
        elif time.monotonic() > self.received + ONE_SIGNAL:  # a second one ends at once
            signal.signal(number, self.before[number])
            signal.raise_signal(number)

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # no other may listen
            self.before = {number: signal.signal(number, self._received) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop, if asked to."""
        if self.deadline is not None and time.monotonic() > self.deadline and not self.reason:
            self.reason = "time limit"
        if args.world_size > 1:
            # A signal reaches the processes at different steps: they stop together or hang.
            if state.global_step % RANKS_AGREE_EVERY:
                return
            asked = torch.tensor(float(self.reason is not None), device=args.device)
            torch.distributed.all_reduce(asked)
            if asked.item() and not self.reason:
                self.reason = "another process was stopped"
        if self.reason and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # made up for when the run continues


class Watch(TrainerCallback):
    """The progress bar: step, loss, tokens per second, time left; or plain lines.

    `scored` names what is evaluated once training is over; before, it is the step.
    """

    def __init__(self, title: str, tokens: float, console: Console) -> None:
        self.title, self.tokens, self.console = title, tokens, console
        self.scored: str | None = None
        self.progress: Progress | None = None
        self.start = (0, 0.0)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave it as it is, however the run ended."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Draw it."""
        if not state.is_world_process_zero:
            return
        self.start = state.global_step, time.perf_counter()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} steps  {task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.bar = self.progress.add_task(
            self.title, total=state.max_steps, completed=state.global_step, figures=""
        )
        self.progress.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move it."""
        if self.progress is not None:
            self.progress.update(self.bar, completed=state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Show the loss of the last steps."""
        if self.progress is None or not logs or "loss" not in logs:
            return
        step, begin = self.start
        rate = (state.global_step - step) * self.tokens / (time.perf_counter() - begin)
        self.progress.update(self.bar, figures=f"loss {logs['loss']:.4f}  {rate:,.0f} tokens/s")
        if not self.console.is_terminal:
            left = (state.max_steps - state.global_step) * self.tokens / rate
            self.console.print(
                f"{self.title}: step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}"
                f"  {rate:,.0f} tokens/s  {left:,.0f} s left",
                soft_wrap=True, highlight=False,
            )  # fmt: skip

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any
    ) -> None:
        """Print what an evaluation found."""
        if not state.is_world_process_zero:
            return
        shown = "  ".join(f"{name} {value:.4f}" for name, value in numbers(metrics).items())
        what = self.scored or f"step {state.global_step}"
        self.console.print(f"{self.title}: {what}  {shown}", soft_wrap=True, highlight=False)
