"""Which method pays at a length: measured here in a minute, or read off earlier rows."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longspan import records
from longspan.attention import auto, checks
from longspan.bench import MODES, error, length, predict
from longspan.bench.suite import Limits, Setting, run
from longspan.report import EXACT, Crossover, crossover, times
from longspan.report.charts import method_of
from longspan.report.section import machine, times_as

SUITE = "advise"
PAYS = 1.2  # times as fast as exact attention: below, an approximation is not worth its error
LIMITS = Limits(budget=0.5, patience=4.0, most=12.0)
ERROR_TOKENS = 1024  # errors of random inputs are looked at up to this length
DTYPES = ("float32", "bfloat16", "float16")
_UNTRAINED = {"linformer": {"projection": "mean-pool"}}  # random matrices would say nothing
_NAMES = {name: row for name, row in length.NAMES.items() if name != "eager"}


@dataclass(frozen=True)
class Question:
    """What is asked: `length` tokens, `heads` of `head_dim`, in training or inference."""

    length: int
    heads: int = 8
    head_dim: int = 64
    dtype: str | None = None  # None and a device of None: whatever was measured last
    train: bool = False
    device: str | None = None

    @property
    def mode(self) -> str:
        """The mode of the rows that answer it."""
        return MODES[self.train]


@dataclass(frozen=True)
class Option:
    """A method at the length asked for: seconds of a sequence, and how it compares with exact."""

    name: str
    seconds: float
    ratio: float
    crossover: Crossover | None
    error: float | None
    extrapolated: bool


@dataclass(frozen=True)
class Advice:
    """One sentence, the call that follows it, and the table behind it, fastest first."""

    sentence: str
    call: str
    options: Sequence[Option]


def measured(
    question: Question,
    setting: Setting,
    path: str | os.PathLike[str],
    *,
    command: str = "",
    say: Callable[[str], object] = print,
) -> list[dict[str, Any]]:
    """The rows that answer a question, after measuring what `path` does not hold yet."""
    checks.integer("length", question.length, 1)
    checks.choice("dtype", question.dtype or setting.dtype, DTYPES)
    tokens = sorted({max(min(question.length, 64), question.length // n) for n in (8, 4, 2, 1)})
    groups = [
        length.group(
            n,
            question.mode,
            setting,
            names=_NAMES,
            heads=question.heads,
            head_dim=question.head_dim,
            dtype=question.dtype,
        )
        for n in tokens
    ]
    inputs = "clustered" if setting.model is None else "real"
    shape = (1, question.heads, min(question.length, ERROR_TOKENS), question.head_dim)
    chosen = [(name, method, options | _UNTRAINED.get(method, {}))
              for name, (method, options) in _NAMES.items()]  # fmt: skip
    groups.append(error.group(inputs, replace(setting, quick=True), shape, chosen))
    todo = [(SUITE, group) for group in groups]
    run(todo, path, setting, limits=LIMITS, command=command, say=say)
    return records.read(path)


def advise(question: Question, rows: Sequence[Mapping[str, Any]]) -> Advice:
    """Answer from timing rows of the question's shape and mode, and from error rows: of any model,
    or of random inputs of that shape.

    Raises `ValueError` where the rows say nothing about exact attention in that shape.
    """
    fitting = [row for row in rows if row.get("kind") == "timing" and _fits(row, question)]
    last = fitting[-1] if fitting else {}
    fitting = [
        row for row in fitting
        if all(row.get(name) == last.get(name) for name in ("dtype", "device"))
    ]  # fmt: skip
    seconds = times(fitting, question.mode)
    exact = seconds.get(EXACT, {})
    if not exact or len(seconds) < 2:
        raise ValueError(
            f"rows must hold times of {EXACT} and of other methods for {question.mode}, "
            f"{question.heads} heads of {question.head_dim}, by longspan bench length or advise, "
            f"got {len(fitting)} such rows"
        )
    at_exact = _at(exact, question.length)
    known = [row for row in rows if row.get("kind") == "error" and _compares(row, question)]
    errors = _errors(known, question.length)
    options = [
        Option(
            name,
            _at(found, question.length),
            at_exact / _at(found, question.length),
            crossover(exact, found),
            errors.get(name),
            question.length > max(exact) or question.length > max(found),
        )
        for name, found in seconds.items()
        if name not in (EXACT, "eager")
    ]
    options.sort(key=lambda option: option.seconds)
    where = f"{question.length:,} tokens ({_words(question, fitting)})"
    sentence, best = _sentence(where, options, _inputs(known))
    return Advice(sentence, _call(best), options)


def from_table(question: Question, device: str) -> str:
    """What the literal table says of a device that is not here."""
    known = auto.CROSSOVERS.get(device.partition(":")[0], {}).get(question.mode, {})
    faster = {m: n for m, n in known.items() if n is not None and n <= question.length}
    if not known:
        return f"There is no {device} here, and none was measured for longspan's own table."
    said = f"There is no {device} here. On the one of longspan's own table, at {question.length:,} "
    if not faster:
        return said + "tokens exact attention is the right choice: no method overtakes it sooner."
    listed = ", ".join(f"{m} from {n:,}" for m, n in sorted(faster.items(), key=lambda x: x[1]))
    return f"{said}tokens these are faster than exact attention: {listed} tokens on."


def _fits(row: Mapping[str, Any], question: Question) -> bool:
    return (
        row.get("suite") in ("length", SUITE)
        and (row.get("heads"), row.get("head_dim")) == (question.heads, question.head_dim)
        and question.dtype in (None, row.get("dtype"))
        and question.device in (None, row.get("device"))
    )


def _compares(row: Mapping[str, Any], question: Question) -> bool:
    """Whether an error says something of a question: a model's own shape does, other shapes not."""
    shape = (row.get("heads"), row.get("head_dim"))
    return row["inputs"] == "real" or shape == (question.heads, question.head_dim)


def _at(seconds: Mapping[int, float], tokens: int) -> float:
    """Seconds at a length: measured, on the line in log-log between two, or predicted beyond."""
    if tokens in seconds:
        return seconds[tokens]
    below = [n for n in seconds if n < tokens]
    above = [n for n in seconds if n > tokens]
    if not above:
        return predict(seconds, tokens)
    if not below:
        return seconds[min(above)]
    a, b = max(below), min(above)
    share = math.log(tokens / a) / math.log(b / a)
    return seconds[a] * (seconds[b] / seconds[a]) ** share


def _errors(rows: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, float]:
    """Error against exact attention by name, on the most real inputs there are, of the length
    nearest to `tokens`, measured last."""
    chosen = [row for row in rows if row["inputs"] == _inputs(rows)]
    chosen.sort(key=lambda row: -abs(math.log(row["length"] / tokens)))
    found = {}
    for name, (method, options) in _NAMES.items():
        for row in chosen:
            wanted = options | _UNTRAINED.get(method, {})
            if row["method"] == method and row["options"] == wanted:
                found[name] = row["error_softmax"]
    return found


def _inputs(rows: Sequence[Mapping[str, Any]]) -> str:
    kinds = {row["inputs"] for row in rows}
    return next((inputs for inputs in ("real", "clustered", "spread") if inputs in kinds), "")


def _sentence(where: str, options: Sequence[Option], inputs: str) -> tuple[str, Option | None]:
    fastest = options[0]
    paying = [option for option in options if option.ratio >= PAYS]
    if not paying:
        how = (
            f"takes {times_as(1 / fastest.ratio)} its time"
            if fastest.ratio < 1
            else f"is only {times_as(fastest.ratio)} as fast"
        )
        later = [o.crossover.length for o in options if o.crossover and o.crossover.length]
        from_ = f"; the first overtakes it at about {min(later):,.0f}" if later else ""
        said = f"At {where} exact attention is the right choice: {fastest.name}, the fastest other"
        return f"{said}, {how}{from_}.", None
    best = min(paying, key=lambda o: (math.inf if o.error is None else o.error, o.seconds))
    said = f"At {where} {best.name} pays: {_gain(best, inputs)}"
    if fastest is not best:
        said += f"; the fastest, {fastest.name}, is {_gain(fastest, inputs, short=True)}"
    return f"{said}. Exact attention is the right choice where that error is too much.", best


def _gain(option: Option, inputs: str, *, short: bool = False) -> str:
    verb = "" if short else "it is "
    guess = " (extrapolated)" if option.extrapolated else ""
    said = f"{verb}{times_as(option.ratio)} as fast as exact attention{guess}"
    point = option.crossover
    if point and point.length and not short:
        sooner = point.length <= point.first
        said += f", faster from {f'{point.first:,}' if sooner else point} tokens on"
        said += " or sooner" if sooner else ""
    if option.error is not None:
        said += f", with an error of {option.error:.0%}"
        said += "" if short else f" on {inputs} inputs before any training"
    return said


def _words(question: Question, rows: Sequence[Mapping[str, Any]]) -> str:
    kind = "training" if question.train else "inference"
    heads = f"{question.heads} head{'s' * (question.heads > 1)}"
    shape = f"{heads} of {question.head_dim}, {rows[-1].get('dtype')}"
    return f"{kind}, {shape}, {machine(rows[-1])}"


def _call(best: Option | None) -> str:
    """The line of Python that follows the advice."""
    if best is None:
        return "longspan.softmax(q, k, v)"
    method, options = _NAMES[best.name] if best.name in _NAMES else (method_of(best.name), {})
    words = [f'approximate="{method}"']
    words += [f"{key}={value}" for key, value in options.items() if key != "projected_length"]
    if method == "linformer":
        words.append("key_projection=E, value_projection=F")
    start = best.crossover.length if best.crossover else None
    if start is not None:
        words.append(f"exact_below={round(start)}")
    return f'longspan.attention(q, k, v, method="auto", {", ".join(words)})'
