"""Markdown tables from the rows of runs.

python -m longspan.training.tables results/study-gpu.jsonl > results/study-gpu.md
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from statistics import median
from typing import Any

from longspan import records

Row = dict[str, Any]
FIGURES = {"loss": "{:.3f}", "perplexity": "{:.1f}", "accuracy": "{:.1%}"}
PAIRS = {"f1": "accuracy", "pearson": "spearman"}  # numbers that GLUE reports together


def study_table(path: str | os.PathLike[str]) -> str:
    """Two tables of a study's rows: pre-training by length, and fine-tuning by task."""
    rows = [row for row in records.read(path) if row.get("kind") == "training"]
    names = list(dict.fromkeys(name_of(row) for row in rows))
    tables: list[str] = []
    for table in (_pretraining(rows, names), _fine_tuning(rows, names)):
        tables += [*table, ""] if table else []
    if any(row.get("side_by_side", 1) > 1 for row in rows):
        tables += ["Runs shared one machine, so that seconds do not compare methods.", ""]
    return "\n".join(tables)


def sweep_table(path: str | os.PathLike[str]) -> str:
    """One line for each combination of a sweep: the first split's numbers, medians over seeds."""
    rows = [row for row in records.read(path) if row.get("kind") == "training"]
    if not rows:
        return ""
    metrics = list(next(iter(rows[0]["metrics"].values())))
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row["varied"]), []).append(row)
    lines = []
    for key, group in groups.items():
        scores = [next(iter(row["metrics"].values())) for row in group]
        cells = [spread([score[m] for score in scores if m in score], "{:.4g}") for m in metrics]
        rate = median(row["tokens_per_second"] or 0 for row in group)
        lines.append([*map(str, json.loads(key).values()), *cells, str(len(group)), f"{rate:,.0f}"])
    head = [*rows[0]["varied"], *metrics, "seeds", "tokens/s"]
    return "\n".join([*markdown(head, lines), ""])


def name_of(row: Row) -> str:
    """What a row is shown as: its variant, or the method."""
    return row.get("variant") or row["method"]


def _pretraining(rows: list[Row], names: list[str]) -> list[str]:
    """Perplexity and accuracy on held-out documents, tokens seen and time."""
    found = [row for row in rows if row["task"].startswith("mlm")]
    lines = []
    for name in names:
        for row in found:
            if name_of(row) != name:
                continue
            for split, values in row["metrics"].items():
                lines.append([
                    name, str(row["recipe"]["length"]), split.rpartition("-")[2],
                    *(_figure(values.get(name), form) for name, form in FIGURES.items()),
                    f"{row['tokens'] / 1e6:.1f}",
                    f"{row['seconds']:.0f}", f"{row['tokens_per_second'] or 0:,.0f}",
                ])  # fmt: skip
    if not found:
        return []
    head = ["method", "trained at", "read at", "loss (nats)", "perplexity", "accuracy",
            "M tokens seen", "seconds", "tokens/s"]  # fmt: skip
    return markdown(head, lines)


def _fine_tuning(rows: list[Row], names: list[str]) -> list[str]:
    """Each task's numbers after the last step, in percent: the median over seeds."""
    tuned = [row for row in rows if not row["task"].startswith("mlm")]
    tasks = {(row["task"], row["recipe"]["length"]): row["best"]["metric"] for row in tuned}
    if not tasks:
        return []
    lines = []
    for name in names:
        cells = []
        for (task, length), metric in tasks.items():
            scores = [
                next(iter(row["metrics"].values()))
                for row in tuned
                if (row["task"], row["recipe"]["length"], name_of(row)) == (task, length, name)
            ]
            both = [metric, PAIRS[metric]] if metric in PAIRS else [metric]
            cells.append(" / ".join(spread([100 * s[m] for s in scores if m in s]) for m in both))
        lines.append([name, *cells])
    heads = [
        f"{task.removeprefix('glue/')} {length}: {' / '.join([m, PAIRS[m]] if m in PAIRS else [m])}"
        for (task, length), m in tasks.items()
    ]
    return markdown(["method", *heads], lines)


def _figure(value: float | None, form: str) -> str:
    """A number as it is written; a dash for one that was not finite."""
    return "–" if value is None else form.format(value)


def spread(values: list[float], form: str = "{:.1f}") -> str:
    """The median, and the range over more than one."""
    if not values:
        return "–"
    middle, low, high = (form.format(f(values)) for f in (median, min, max))
    return middle if len(values) == 1 else f"{middle} ({low}–{high})"


def markdown(head: list[str], lines: Iterable[list[str]]) -> list[str]:
    """A table as lines of Markdown."""
    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]


if __name__ == "__main__":
    print(study_table(sys.argv[1]), end="")
