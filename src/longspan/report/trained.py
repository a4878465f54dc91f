"""Models that were trained: Long Range Arena, GLUE and masked LM, beside the papers' rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from longspan.report import published
from longspan.report.charts import layout, trace
from longspan.report.section import Chart, Rows, Section, Table, number

Scores = dict[str, dict[str, list[float]]]  # name, task: percent of every seed


def is_trained(row: Mapping[str, Any]) -> bool:
    """Whether a row is the result of `longspan train`."""
    return row.get("kind") in ("training", "evaluation") and isinstance(row.get("metrics"), dict)


def sections(rows: Rows, prefix: str) -> list[Section]:
    """A section for each family of tasks that there are rows of."""
    done = [row for row in rows if is_trained(row) and row["metrics"]]
    arena = [row for row in done if str(row["task"]).startswith("lra/")]
    language = [row for row in done if str(row["task"]).startswith("mlm")]
    others = [row for row in done if row not in arena and row not in language]
    return [*_arena(arena, prefix), *_language(language), *_glue(others)]


def _name(row: Mapping[str, Any]) -> str:
    return str(row.get("variant") or row["method"])


def _score(row: Mapping[str, Any]) -> float:
    """The number a task is judged by, in percent, on the test split where there is one."""
    metrics = row["metrics"].get("test") or next(iter(row["metrics"].values()))
    best = (row.get("best") or {}).get("metric", "accuracy")
    return 100 * float(metrics.get(best, metrics.get("accuracy", math.nan)))


def _scores(rows: Iterable[Mapping[str, Any]]) -> Scores:
    found: Scores = {}
    for row in rows:
        task = str(row["task"]).rpartition("/")[2]
        found.setdefault(_name(row), {}).setdefault(task, []).append(_score(row))
    return found


def _cell(values: list[float] | None) -> str:
    """The median, with the range over more than one seed."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def _arena(rows: Rows, prefix: str) -> list[Section]:
    scores = _scores(rows)
    if not scores:
        return []
    tasks = [t for t in published.LRA_TASKS if any(t in found for found in scores.values())]
    tasks += sorted({t for found in scores.values() for t in found} - set(tasks))
    lines = []
    for name, found in scores.items():
        values = [median(found[t]) for t in published.LRA_TASKS if t in found]
        mean = f"{sum(values) / len(values):.1f}" if len(values) == len(published.LRA_TASKS) else ""
        lines.append([name, "here", *(_cell(found.get(t)) for t in tasks), mean])
    for (name, source), printed in published.LRA.items():
        known = dict(zip(published.LRA_TASKS, printed, strict=True))
        cells = (f"{known[t]:.1f}" if t in known else "" for t in tasks)
        lines.append([name, source, *cells, f"{sum(printed) / len(printed):.1f}"])
    protocols = sorted({str(row["protocol"]) for row in rows if row.get("protocol")})
    return [
        Section(
            "Long Range Arena",
            "Accuracy in percent, the median over seeds and its range; the average is over the "
            "five tasks. Published rows are of full runs on the arena's own data."
            + (f" Protocol of the rows here: {', '.join(protocols)}." if protocols else ""),
            _speed(rows, scores, prefix),
            [Table(["method", "source", *tasks, "average"], lines)],
        )
    ]


def _speed(rows: Rows, scores: Scores, prefix: str) -> list[Chart]:
    """Mean accuracy against tokens a second, over the tasks that every method has."""
    common = set.intersection(*(set(found) for found in scores.values()))
    rates: dict[str, list[float]] = {}
    for row in rows:
        if row.get("tokens_per_second") and str(row["task"]).rpartition("/")[2] in common:
            rates.setdefault(_name(row), []).append(math.log(row["tokens_per_second"]))
    data = []
    for name, logs in rates.items():
        mean = sum(median(scores[name][task]) for task in common) / len(common)
        x = [math.exp(sum(logs) / len(logs))]
        data.append(trace(name, x, [mean], mode="markers"))
    if len(data) < 2:
        return []
    x_axis = {"type": "log", "title": "tokens a second in training", "exponentformat": "none"}
    figure = {"data": data, "layout": layout(x_axis, {"title": "accuracy (%)"})}
    caption = f"Accuracy against speed: means over {', '.join(sorted(common))}."
    return [Chart(f"{prefix}lra", figure, caption)]


def _language(rows: Rows) -> list[Section]:
    lines = []
    for row in rows:
        for split, values in row["metrics"].items():
            length = (row.get("recipe") or {}).get("length", "")
            rate = row.get("tokens_per_second")
            shown = [values.get("loss"), values.get("perplexity"), values.get("accuracy")]
            lines.append(
                [
                    _name(row),
                    f"{length}",
                    split,
                    *("" if x is None else number(x) for x in shown),
                    "" if not rate else number(rate),
                ]
            )
    head = ["method", "trained at", "split", "loss", "perplexity", "accuracy", "tokens a second"]
    text = "Masked-language-model pre-training, on held-out text."
    return [Section("Masked language models", text, (), [Table(head, lines)])] if lines else []


def _glue(rows: Rows) -> list[Section]:
    scores = _scores(rows)
    if not scores:
        return []
    tasks = list(dict.fromkeys(task for found in scores.values() for task in found))
    lines = [[n, "here", *(_cell(found.get(t)) for t in tasks)] for n, found in scores.items()]
    for (name, source), known in published.GLUE.items():
        if any(task in known for task in tasks):
            cells = (f"{known[t]:.1f}" if t in known else "" for t in tasks)
            lines.append([name, source, *cells])
    return [
        Section(
            "GLUE and other fine-tuning",
            "Percent on the development sets, the median over seeds and its range. Published rows "
            "are of models pre-trained on far more text.",
            tables=[Table(["method", "source", *tasks], lines)],
        )
    ]
