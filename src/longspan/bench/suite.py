"""What the suites share: groups of entries in, rows out, and going on where a run stopped.

A row is one JSON object (see `longspan.records`). Every suite writes

    suite, name, key    the table it belongs to, what it is called there, what tells it apart
    kind                "timing", "error", "spectrum", "projection", or "stopped" with a reason
    method, options, mode, length, batch, heads, head_dim, dtype, device         what was run
    seconds, low, high, repeats, peak_bytes     of one call: median, quartiles, memory it adds
    host_seconds                        on a GPU, until the call returned
    seed, quick, command, load          how it was made; the machine's load average meanwhile

and what only that suite measures.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longspan import records
from longspan.bench.measure import Timing, affordable, measure, peak_bytes, predict

Call = Callable[[], object]
EXACT = "softmax"
MIN_REPEATS = 3
CALLS = 2 + MIN_REPEATS  # one to warm up, one for memory


DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class Setting:
    """What the user chose; `lengths` empty means those of the suite."""

    device: str = "cpu"
    quick: bool = False
    seed: int = 0
    lengths: tuple[int, ...] = ()
    model: str | None = None
    text: str | None = None

    def __post_init__(self) -> None:
        """Check that torch knows the device."""
        try:
            kind = torch.device(self.device).type
        except RuntimeError:
            kind = ""
        if kind not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")

    @property
    def cuda(self) -> bool:
        """Whether to compute on an NVIDIA GPU."""
        return torch.device(self.device).type == "cuda"

    @property
    def dtype(self) -> str:
        """What a machine of this kind is used with."""
        return "bfloat16" if self.cuda else "float32"


@dataclass(frozen=True)
class Limits:
    """Seconds: of repeats in a group, of one call that is still made, of a whole group."""

    budget: float
    patience: float
    most: float

    @classmethod
    def of(cls, setting: Setting) -> Limits:
        """Short on a GPU, whose time is dear, and for `quick`."""
        if setting.cuda:
            return cls(0.15, 0.3, 3.0) if setting.quick else cls(0.3, 1.0, 4.0)
        return cls(1.0, 1.5, 20.0) if setting.quick else cls(3.0, 20.0, 240.0)


@dataclass(frozen=True)
class Entry:
    """One row to come: `build` makes the call to time, `extra` adds to the row so far.

    `needs` is a guess of the bytes a call takes, where it may be more than the machine has.
    """

    name: str
    about: Mapping[str, Any]
    build: Callable[[], Call] | None = None
    extra: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    needs: int = 0


@dataclass(frozen=True)
class Group:
    """Entries that are timed in turn. Groups of one series differ in length (and batch) alone."""

    title: str
    entries: list[Entry]
    series: str = ""
    length: int = 1
    batch: int = 1


@dataclass
class History:
    """Seconds of one sequence by series, name and length: what the next length may take."""

    seconds: dict[tuple[str, str], dict[int, float]] = field(default_factory=dict)
    ended: dict[tuple[str, str], int] = field(default_factory=dict)  # at the shortest such length

    def add(self, group: Group, name: str, row: Mapping[str, Any]) -> None:
        """Remember a row, timed or stopped."""
        if "seconds" in row:
            per_sequence = row["seconds"] / group.batch
            self.seconds.setdefault((group.series, name), {})[group.length] = per_sequence
        elif row.get("kind") == "stopped":
            known = self.ended.get((group.series, name), group.length)
            self.ended[group.series, name] = min(known, group.length)

    def predicted(self, group: Group) -> dict[str, float]:
        """Seconds of a call, for the entries that were timed at another length of the series."""
        found = {}
        for entry in group.entries:
            before = self.seconds.get((group.series, entry.name))
            if before:
                found[entry.name] = group.batch * predict(before, group.length)
        return found

    def cost(self, group: Group, limits: Limits) -> float:
        """Rough seconds of a group."""
        calls = [t for t in self.predicted(group).values() if t <= limits.patience]
        return max(1.5 * limits.budget, min(limits.most, CALLS * sum(calls)))


def run(
    groups: Iterable[tuple[str, Group]],
    path: str | os.PathLike[str],
    setting: Setting,
    *,
    limits: Limits | None = None,
    only: Sequence[str] = (),
    fresh: bool = False,
    command: str = "",
    say: Callable[[str], object] = print,
) -> int:
    """Measure what `path` does not hold yet (with `fresh`, all), append it, return how many rows.

    `only` keeps the names that begin with one of its texts, and exact attention beside them.
    What would take longer than its limits at a length is left out there and beyond, with a
    "stopped" row that says so; so is what does not fit into memory.
    """
    limits, history = limits or Limits.of(setting), History()
    known = {} if fresh else _known(path)
    todo: list[tuple[str, Group, list[Entry]]] = []
    groups = list(groups)
    names = {entry.name for _, group in groups for entry in group.entries}
    for text in only or ():
        if not any(name.startswith(text) for name in names):
            raise ValueError(f"only must begin one of {', '.join(sorted(names))}, got {text!r}")
    for suite, group in groups:
        missing = []
        for entry in group.entries:
            if only and not entry.name.startswith((EXACT, *only)):
                continue
            row = known.get(_key(suite, group, entry, setting))
            if row is None:
                missing.append(entry)
            else:
                history.add(group, entry.name, row)
        if missing:
            todo.append((suite, group, missing))
    say(f"{sum(len(m) for *_, m in todo)} rows to measure, in {len(todo)} groups; in {path}")
    begin, written = time.perf_counter(), 0
    for number, (suite, group, missing) in enumerate(todo, start=1):
        left = sum(history.cost(g, limits) for _, g, _ in todo[number - 1 :])
        gone = time.perf_counter() - begin
        say(f"[{number}/{len(todo)}] {suite}: {group.title}   ({_clock(gone, left)})")
        for entry, row in _rows(group, missing, setting, limits, history):
            history.add(group, entry.name, row)
            stamped = {
                "suite": suite,
                "name": entry.name,
                "key": _key(suite, group, entry, setting),
                **row,
                "seed": setting.seed,
                "quick": setting.quick,
                "command": command,
                "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
            }
            say(_line(records.append(path, stamped)))
            written += 1
        gc.collect()
    return written


def _rows(
    group: Group, missing: list[Entry], setting: Setting, limits: Limits, history: History
) -> Iterator[tuple[Entry, dict[str, Any]]]:
    """Rows of a group: first what is left out, then what was timed, then what is only computed."""
    predicted = history.predicted(group)
    chosen = affordable(
        predicted, patience=limits.patience, left=limits.most, calls=CALLS, keep=EXACT
    )
    calls: dict[str, Call] = {}
    peaks: dict[str, int | None] = {}
    for entry in missing:
        if entry.build is None:
            continue
        reason = None
        if history.ended.get((group.series, entry.name), group.length) < group.length:
            reason = "stopped at a shorter length"
        elif entry.name in predicted and entry.name not in chosen:
            reason = f"would take about {predicted[entry.name]:.2g} s a call"
        elif entry.needs > 0.6 * _free_bytes(setting):
            reason = f"needs about {entry.needs / 1e9:.0f} GB of memory"
        else:
            try:
                call = entry.build()
                call()
                peaks[entry.name] = peak_bytes(call, setting.device)
                calls[entry.name] = call
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                reason = "out of memory"
                if setting.cuda:
                    torch.cuda.empty_cache()
        if reason:
            row = {**entry.about, "kind": "stopped", "reason": reason}
            yield entry, row | {"predicted": predicted.get(entry.name)}
    timings = _timed(calls, setting, limits)
    for entry in missing:
        row = {"kind": "timing", **entry.about}
        if entry.name in calls:
            row |= {**timings[entry.name].fields(), "peak_bytes": peaks[entry.name]}
        elif entry.build is not None:
            continue
        yield entry, {**row, **(entry.extra(row) if entry.extra else {})}


def _timed(calls: Mapping[str, Call], setting: Setting, limits: Limits) -> dict[str, Timing]:
    if not calls:
        return {}
    return measure(
        calls,
        budget=limits.budget,
        warmup=int(setting.cuda),
        min_repeats=MIN_REPEATS,
        patience=limits.patience,
        device=setting.device,
    )


def _known(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Rows of a file that this machine made, by key."""
    if not Path(path).exists():
        return {}
    here = _machine(records.environment())
    rows = [row for row in records.read(path) if "key" in row]
    return {row["key"]: row for row in rows if _machine(row.get("environment", {})) == here}


def _machine(environment: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(environment.get(name) for name in ("cpu", "cores", "gpu"))


def _key(suite: str, group: Group, entry: Entry, setting: Setting) -> str:
    quick = ", quick" * setting.quick
    return f"{suite}: {entry.name}, {group.title}, {setting.device}, seed {setting.seed}{quick}"


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error)


def _free_bytes(setting: Setting) -> float:
    if setting.cuda:
        return float("inf")  # there it is tried, and says so
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8e9


def _clock(gone: float, left: float) -> str:
    return f"{gone:.0f} s gone, about {left:.0f} s left"


def _line(row: Mapping[str, Any]) -> str:
    """A row in one line of the terminal."""
    words = [f"  {row['name']:<26}"]
    if row["kind"] == "stopped":
        return f"{words[0]} {row['reason']}"
    if "seconds" in row:
        ms = [1000 * row[part] for part in ("seconds", "low", "high")]
        words.append(f"{ms[0]:>10.3g} ms ({ms[1]:.3g}–{ms[2]:.3g}, {row['repeats']} times)")
    if row.get("peak_bytes") is not None:
        words.append(f"{row['peak_bytes'] / 2**20:,.0f} MB")
    words += [f"{name} {row[name]:.3g}" for name in row if name.startswith("error_")]
    return "  ".join(words)
