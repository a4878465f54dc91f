"""Models that were trained: Long Range Arena, GLUE and masked LM, beside the papers' rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from longspan.report import published
from longspan.report.charts import layout, method_of, ring, trace
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
    if row.get("variant"):
        return str(row["variant"])
    size = (row.get("options") or {}).get(published.NAMED_BY.get(row["method"], ""))
    return str(row["method"]) if size is None else f"{row['method']}-{size}"


def _task(row: Mapping[str, Any]) -> str:
    return str(row["task"]).rpartition("/")[2]


def _protocol(row: Mapping[str, Any]) -> str:
    data = (row.get("recipe") or {}).get("data") or {}
    return str(row.get("protocol") or data.get("protocol") or "")


def _longest(rows: Rows) -> list[Mapping[str, Any]]:
    """Of a method, protocol and task the settings nearest to published runs, else the last ones.

    Of a seed the last run.
    """
    found: dict[tuple[str, str, str], dict[Any, dict[Any, Mapping[str, Any]]]] = {}
    for row in rows:
        group = row.get("steps") or 0, published.choices(row)
        same = found.setdefault((_name(row), _protocol(row), _task(row)), {})
        same.setdefault(group, {})[row.get("seed")] = row
    chosen: list[Mapping[str, Any]] = []
    for same in found.values():
        ranked = [
            (published.nearness([*seeds.values()]), i, seeds)
            for i, seeds in enumerate(same.values())
        ]
        chosen += max(ranked, key=lambda x: x[:2])[2].values()
    return chosen


def _score(row: Mapping[str, Any]) -> float:
    """The number a task is judged by, in percent, on the test split where there is one."""
    metrics = row["metrics"].get("test") or next(iter(row["metrics"].values()))
    best = (row.get("best") or {}).get("metric", "accuracy")
    return 100 * float(metrics.get(best, metrics.get("accuracy", math.nan)))


def _scores(rows: Iterable[Mapping[str, Any]]) -> Scores:
    found: Scores = {}
    for row in rows:
        found.setdefault(_name(row), {}).setdefault(_task(row), []).append(_score(row))
    return found


def _cell(values: list[float] | None) -> str:
    """The median, with the range over more than one seed."""
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.1f}"
    return f"{median(values):.1f} ({min(values):.1f}–{max(values):.1f})"


def _arena(rows: Rows, prefix: str) -> list[Section]:
    rows = _longest(rows)
    if not rows:
        return []
    here = {_task(row) for row in rows}
    tasks = [t for t in published.ARENA_TASKS if t in here]
    tasks += sorted(here - set(tasks))
    lines = []
    for protocol in dict.fromkeys(map(_protocol, rows)):
        chosen = [row for row in rows if _protocol(row) == protocol]
        short = {(_name(row), _task(row)) for row in chosen if _short(row)}
        for name, found in _scores(chosen).items():
            cells = [
                _cell(found.get(task)) + (" †" if (name, task) in short else "") for task in tasks
            ]
            whole = all(t in found and (name, t) not in short for t in published.ARENA_TASKS)
            medians = [median(found[t]) for t in published.ARENA_TASKS if t in found]
            mean = f"{sum(medians) / len(medians):.1f}" if whole else ""
            lines.append([name, f"here{', ' * bool(protocol)}{protocol}", *cells, mean])
    averaged = any(line[-1] for line in lines)  # else there is nothing to compare, and no room
    for printed in published.ARENA:
        known = dict(zip(published.ARENA_TASKS, printed.accuracy, strict=True))
        cells = [f"{known[t]:.1f}" if t in known else "" for t in tasks]
        average = f"{sum(printed.accuracy) / len(printed.accuracy):.1f}"
        lines.append([printed.name, printed.source, *cells, average])
    head = ["method", "source", *tasks, "average"]
    table = [line if averaged else line[:-1] for line in (head, *lines)]
    return [
        Section(
            "Long Range Arena",
            "Accuracy in percent, the median over seeds and its range"
            + ("; the average is over the five tasks" if averaged else "")
            + ". † fewer steps or tokens than in published runs, which are of the arena's own "
            "data.",
            _seeds(rows, tasks, prefix),
            [Table(table[0], table[1:])],
        )
    ]


def _short(row: Mapping[str, Any]) -> bool:
    """Whether a run had less to read than published ones, as far as that can be told."""
    return published.parts(row) != (1, 1)


def _seeds(rows: Rows, tasks: list[str], prefix: str) -> list[Chart]:
    """Accuracy of every seed by task, in the commonest protocol, and rings at published ones.

    Methods that were run on less than half as many of the arena's own tasks as others are left out.
    """
    protocol, _ = Counter(map(_protocol, rows)).most_common(1)[0]
    scores = _scores(row for row in rows if _protocol(row) == protocol)
    runs = {name: len(found.keys() & published.ARENA_TASKS) for name, found in scores.items()}
    names = [name for name, count in runs.items() if 2 * count >= max(runs.values())]
    tasks = [task for task in tasks if any(task in scores[name] for name in names)]
    theirs = {x.method: dict(zip(published.ARENA_TASKS, x.accuracy, strict=True))
              for x in reversed(published.ARENA)}  # fmt: skip
    data = []
    for i, name in enumerate(names):
        places = {task: at + 0.7 * ((i + 0.5) / len(names) - 0.5) for at, task in enumerate(tasks)}
        points = [(places[task], y) for task, ys in scores[name].items() for y in ys]
        known = theirs.get(method_of(name), {})
        printed = [(places[task], known[task]) for task in scores[name] if task in known]
        x, y = zip(*points, strict=True)
        hover = "<b>%s</b> %%{y:.1f} %%<extra></extra>"
        data.append(trace(name, x, y, mode="markers", hovertemplate=hover % name))
        if printed:
            x, y = zip(*printed, strict=True)
            told = hover % f"{name}, published"
            data.append(trace(name, x, y, hovertemplate=told, **ring(name)))
    x_axis = {
        "title": "task", "tickvals": list(range(len(tasks))), "ticktext": tasks,
        "range": [-0.5, len(tasks) - 0.5],
    }  # fmt: skip
    figure = {"data": data, "layout": layout(x_axis, {"title": "accuracy (%)"})}
    caption = "Accuracy of every seed; a ring is the published accuracy of the same method."
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
