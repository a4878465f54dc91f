"""What the measurements say, in two sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longspan.report.charts import EXACT
from longspan.report.crossover import times

Rows = Sequence[Mapping[str, Any]]


def summary(rows: Rows) -> list[str]:
    """Sentences on time and on training; only those the rows can support."""
    sentences = [_time(rows, "forward", "forward pass")]
    sentences.append(_time(rows, "forward+backward", "forward and backward pass"))
    sentences.append(_training(rows))
    return [sentence for sentence in sentences if sentence]


def _time(rows: Rows, mode: str, words: str) -> str:
    """Exact attention against the fastest other method, at the longest length both ran."""
    table = times(rows, mode)
    exact = table.pop(EXACT, {})
    common = [n for n in exact if any(n in seconds for seconds in table.values())]
    if not common:
        return ""
    length = max(common)
    rivals = {method: seconds[length] for method, seconds in table.items() if length in seconds}
    best = min(rivals, key=rivals.__getitem__)
    ratio = exact[length] / rivals[best]
    return (
        f"At {length:,} tokens one {words} of exact attention takes {_seconds(exact[length])}; "
        f"{best}, the fastest of the others, takes {_seconds(rivals[best])}: {_verdict(ratio)}."
    )


def _training(rows: Rows) -> str:
    """Exact attention against the quickest method that learns the task about as well."""
    last = {
        row["method"]: row
        for row in rows
        if row.get("kind") == "training" and row.get("accuracy") is not None
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
