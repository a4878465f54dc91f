"""The Long Range Arena: our rows beside the published ones.

    python -m longspan.report.lra results/lra.jsonl

writes results/lra.md from rows that `longspan arena` or `longspan train lra/…` made; `longspan
report` prints the same, shorter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from longspan import records
from longspan.report.published import ARENA as PUBLISHED
from longspan.report.published import ARENA_TASKS as TASKS
from longspan.report.published import NAMED_BY, choices, nearness, parts

Row = Mapping[str, Any]
EXTRA = "retrieval-wiki"
RUN = ("task", "method", "protocol", "settings", "steps", "seeds", "test", "validation",
       "published", "seconds", "at once", "machine")  # fmt: skip
CHANCE = "the commonest class", (17.2, 50.0, 50.0, 10.0, 50.0, 50.0)  # of TASKS and EXTRA


class Group(NamedTuple):
    """Runs that differ in their seeds alone."""

    task: str
    name: str
    method: str
    protocol: str
    steps: int
    settings: str
    rows: tuple[Row, ...]

    @property
    def accuracy(self) -> list[float]:
        """Of the test split, in percent, by seed."""
        return [100 * row["metrics"]["test"]["accuracy"] for row in self.rows]

    @property
    def complete(self) -> bool:
        """Whether as much was read, in as many steps, and as much scored as in published runs."""
        scored = not self.rows[0]["recipe"]["data"].get("evaluation_rows")
        return scored and parts(self.rows[0]) == (1, 1)


def name(row: Row) -> str:
    """The method with the option it is usually named by: yoso-32, nystrom-128."""
    option = row["options"].get(NAMED_BY.get(row["method"], ""))
    plain = str(row["method"]).replace("_", " ")
    return plain if option is None else f"{plain}-{option}"


def groups(rows: Iterable[Row]) -> list[Group]:
    """The runs of the arena by all but their seed and what changes their time alone.

    Of one seed the last row counts.
    """
    found: dict[tuple, dict[int, Row]] = {}
    for row in rows:
        task = str(row.get("task", ""))
        if row.get("kind") != "training" or not task.startswith("lra/") or not _whole(row):
            continue
        recipe = row["recipe"]
        key = (
            task.removeprefix("lra/"), name(row), row["method"], recipe["data"]["protocol"],
            row["steps"], choices(row),
        )  # fmt: skip
        found.setdefault(key, {})[row["seed"]] = row
    made = [
        Group._make((*key, tuple(row for _, row in sorted(by.items()))))
        for key, by in found.items()
    ]
    order = [*TASKS, EXTRA]
    return sorted(made, key=lambda g: (order.index(g.task), g.protocol, -g.steps))


def _whole(row: Row) -> bool:
    """Whether a row says all that is shown of it."""
    scored = row.get("metrics") or {}
    data = (row.get("recipe") or {}).get("data") or {}
    accurate = all("accuracy" in scored.get(split, {}) for split in ("validation", "test"))
    return accurate and "protocol" in data and {"steps", "seconds", "options"} <= row.keys()


def markdown(rows: Iterable[Row]) -> str:
    """Both tables: accuracy by method and task beside published ones, and every group of runs."""
    found = groups(rows)
    if not found:
        return ""
    tasks = _tasks(found)
    parts = [
        "# Long Range Arena",
        "Accuracy on the test split in percent, of the weights with the best validation: mean over "
        "seeds ± standard deviation (how many seeds). † fewer steps or tokens than published; the "
        "average is over five complete tasks. `longspan` is the protocol of correct masks, "
        "held-out validation and batches of similar lengths; `wisconsin` and `google` do as "
        "published code does.",
        _table(["", "protocol", *tasks, "average"], [*_ours(found, tasks), *_theirs(tasks)]),
        "35 to 37 % of ListOps come from reading the outermost operator alone; only more than that "
        "shows that the tree is read. Differences of less than a point are noise on ListOps and "
        "Text." + (f" `{EXTRA}` is a set of our own, not AAN." if EXTRA in tasks else ""),
        "## Runs",
        "`published` is the same method's in the tables above, in the same two-layer setting where "
        "there is one. Seconds are of training alone, with so many runs on the machine at once.",
        _table(RUN, [_run(group) for group in found]),
    ]
    return "\n\n".join(parts) + "\n"


def lines(rows: Iterable[Row]) -> list[str]:
    """Both tables for a terminal: accuracy in the tasks that there are runs of, and the runs."""
    found = groups(rows)
    if not found:
        return []
    tasks = [task for task in _tasks(found) if any(group.task == task for group in found)]
    shown = [TASKS.index(task) for task in tasks if task in TASKS]
    theirs = [
        [f"{x.name}, {x.source.partition(' et al')[0]}", "published",
         *(f"{x.accuracy[i]:g}" for i in shown)]
        for x in PUBLISHED
    ]  # fmt: skip
    ours = [[label.strip("*"), *cells[:-1]] for label, *cells in _ours(found, tasks)]
    left_out = ("settings", "validation", "published", "machine")
    brief = [*(i for i, name in enumerate(RUN) if name not in left_out), RUN.index("settings")]
    return [
        "Long Range Arena: test accuracy in % (seeds); † fewer steps or tokens than published",
        *_aligned([["", "protocol", *tasks], *ours, *theirs]),
        "",
        *_aligned([[line[i] for i in brief] for line in (RUN, *map(_run, found))]),
        "",
    ]


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns below each other, two blanks between them."""
    size = max(map(len, table))
    padded = [[*line, *[""] * (size - len(line))] for line in table]
    widths = [max(map(len, column)) for column in zip(*padded, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in padded
    ]


def _tasks(found: Sequence[Group]) -> list[str]:
    return [*TASKS, *([EXTRA] if any(group.task == EXTRA for group in found) else [])]


def _ours(found: Sequence[Group], tasks: Sequence[str]) -> list[list[str]]:
    """A line for each method and protocol, of the groups nearest to published runs."""
    best: dict[tuple[str, str], dict[str, Group]] = {}
    for group in found:
        line = best.setdefault((group.name, group.protocol), {})
        if group.task not in line or nearness(group.rows) > nearness(line[group.task].rows):
            line[group.task] = group
    lines = []
    for (label, protocol), line in best.items():
        cells = [_cell(line[task]) if task in line else "" for task in tasks]
        whole = all(task in line and line[task].complete for task in TASKS)
        average = f"{mean(mean(line[task].accuracy) for task in TASKS):.2f}" if whole else ""
        lines.append([f"**{label}**", protocol, *cells, average])
    return lines


def _theirs(tasks: Sequence[str]) -> list[list[str]]:
    blank = [""] * (len(tasks) - len(TASKS))
    lines = [
        [f"{x.name}, {x.source}", "published", *(f"{a:g}" for a in x.accuracy), *blank,
         f"{mean(x.accuracy):.2f}"]
        for x in PUBLISHED
    ]  # fmt: skip
    return [*lines, [CHANCE[0], "", *(f"{a:g}" for a in CHANCE[1][: len(tasks)]), ""]]


def _cell(group: Group) -> str:
    return _spread(group.accuracy) + ("" if group.complete else " †")


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f} (1)"
    return f"{mean(values):.2f} ± {stdev(values):.2f} ({len(values)})"


def _run(group: Group) -> list[str]:
    published = [x for x in PUBLISHED if x.method == group.method]
    against = ""
    if published and group.task in TASKS:
        theirs = published[0].accuracy[TASKS.index(group.task)]
        against = f"{theirs:g} ({mean(group.accuracy) - theirs:+.2f})"
    validation = [100 * row["metrics"]["validation"]["accuracy"] for row in group.rows]
    seconds = [row["seconds"] for row in group.rows]
    stamps = [row.get("environment", {}) for row in group.rows]
    machines = dict.fromkeys(str(x.get("gpu") or x.get("cpu") or "") for x in stamps)
    at_once = dict.fromkeys(str(row.get("side_by_side", 1)) for row in group.rows)
    return [
        group.task, group.name, group.protocol, group.settings, f"{group.steps:,}",
        _ranges([row["seed"] for row in group.rows]), _cell(group),
        f"{mean(validation):.2f}", against, f"{mean(seconds):.0f}", ", ".join(at_once),
        ", ".join(machines),
    ]  # fmt: skip


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, three or more in a row by the first and the last: 0, 2 to 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs
    )


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def main(path: str | os.PathLike[str]) -> None:
    """Write the tables beside the rows, and say where."""
    text = markdown(records.read(path)) if Path(path).is_file() else ""
    if not text:
        sys.exit(f"{path} must hold rows of lra/… tasks, got none")
    tables = Path(path).with_suffix(".md")
    tables.write_text(text, encoding="utf-8")
    print(f"Wrote {tables}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "results/lra.jsonl")
