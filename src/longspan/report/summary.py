"""What the measurements say, in a few sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspan.report.charts import EXACT
from longspan.report.crossover import crossover, label, times
from longspan.report.section import Rows, machine
from longspan.report.trained import is_trained

_NOT_RIVALS = ("eager",)  # another way to the same


def summary(rows: Rows) -> list[str]:
    """Sentences on time, error and training; only those the rows can support."""
    sentences = []
    timed = [row for row in rows if row.get("kind") == "timing" and _alone(row)]
    machines = list(dict.fromkeys(machine(row) for row in timed))
    for name in machines:
        here = [row for row in timed if machine(row) == name]
        where = f"On {name}: " if len(machines) > 1 else ""
        sentences.append(_time(here, "forward", "forward pass", where))
        sentences.append(_time(here, "forward+backward", "forward and backward pass", where))
    sentences += [_error(rows), _training(rows)]
    return [sentence for sentence in sentences if sentence]


def _alone(row: Mapping[str, Any]) -> bool:
    """Whether a timing row is of attention alone, over length."""
    return row.get("suite", "length") == "length"


def _time(rows: Rows, mode: str, words: str, where: str) -> str:
    """Exact attention against the fastest other method, at the longest length both ran."""
    table = {name: t for name, t in times(rows, mode).items() if name not in _NOT_RIVALS}
    exact = table.pop(EXACT, {})
    common = [n for n in exact if any(n in seconds for seconds in table.values())]
    if not common:
        return ""
    length = max(common)
    rivals = {method: seconds[length] for method, seconds in table.items() if length in seconds}
    best = min(rivals, key=rivals.__getitem__)
    ratio = exact[length] / rivals[best]
    said = f"{where}at" if where else "At"
    return (
        f"{said} {length:,} tokens one {words} of exact attention takes "
        f"{_seconds(exact[length])}; {best}, the fastest of the others, takes "
        f"{_seconds(rivals[best])}: {_verdict(ratio)}{_from(exact, table)}."
    )


def _from(exact: Mapping[int, float], rivals: Mapping[str, Mapping[int, float]]) -> str:
    """From which length any method is faster at all."""
    points = [crossover(exact, seconds) for seconds in rivals.values()]
    starts = [point for point in points if point is not None and point.length is not None]
    if not starts:
        return ""
    first = min(starts, key=lambda point: point.length or 0)
    if first.length is not None and first.length <= first.first:
        return f", and some are faster from {first.first:,} tokens on or sooner"
    return f", and below {str(first).split(' (')[0]} tokens exact attention is the fastest"


def _shape(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("length", "heads", "head_dim", "dtype", "device"))


def _error(rows: Rows) -> str:
    """The nearest cheap methods on the most real inputs there are."""
    errors = [row for row in rows if row.get("kind") == "error"]
    for inputs in ("real", "clustered", "spread"):
        chosen = [row for row in errors if row["inputs"] == inputs]
        exact = {_shape(row): row["seconds"] for row in chosen if row["method"] == EXACT}
        cheap = [
            row
            for row in chosen
            if row["method"] != EXACT and row["seconds"] < exact.get(_shape(row), 0)
        ]
        if cheap:
            best = min(cheap, key=lambda row: row["error_softmax"])
            return (
                f"On {inputs} inputs of {best['length']:,} tokens, untrained, the nearest to exact "
                f"attention of what is faster than it is {label(best)}, with an error of "
                f"{best['error_softmax']:.0%}."
            )
        if exact:
            return (
                f"On {inputs} inputs of {chosen[-1]['length']:,} tokens nothing is faster than "
                "exact attention."
            )
    return ""


def _training(rows: Rows) -> str:
    """Exact attention against the quickest method that learns the demo's task about as well."""
    last = {
        row["method"]: row
        for row in rows
        if row.get("kind") == "training" and row.get("accuracy") is not None and not is_trained(row)
    }
    exact = last.pop(EXACT, None)
    if exact is None or not last:
        return ""
    if exact["accuracy"] < max(0.5, 2 * exact["chance"]):
        return f"{exact['step']} training steps were too few for exact attention to learn the task."
    said = (
        f"Trained on documents of up to {exact['length']:,} tokens, exact attention answers "
        f"{exact['accuracy']:.0%} of new questions after {exact['seconds']:.0f} s"
    )
    able = [row for row in last.values() if row["accuracy"] >= exact["accuracy"] - 0.03]
    if not able:
        return f"{said}; no other method comes close."
    best = min(able, key=lambda row: row["seconds"])
    return (
        f"{said}; {best['method']} answers {best['accuracy']:.0%} "
        f"after {best['seconds']:.0f} s of the same steps."
    )


def _verdict(ratio: float) -> str:
    if abs(ratio - 1) < 0.05:
        return "no difference"
    factor, word = (ratio, "faster") if ratio > 1 else (1 / ratio, "slower")
    return f"{factor:.0f}× {word}" if factor >= 10 else f"{factor:.1f}× {word}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
