"""The page: what was measured, drawn and tabulated in one HTML file that needs no network."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longspan.report import grids, quality, timing, trained
from longspan.report.charts import STYLES, accuracy_chart, loss_chart, method_of, style
from longspan.report.section import Chart, Rows, Section, Table, machine, slug
from longspan.report.summary import summary

_DEMO = "demo"
_KNOWN = ("timing", "stopped")


def write_page(
    rows: Iterable[Mapping[str, Any]], path: str | os.PathLike[str], problems: Iterable[str] = ()
) -> Path:
    """Draw rows as one offline page, and return its path.

    Of several demos in the rows, the last is drawn; of rows with one key, the last. `problems` are
    sentences on what was left out. Raises `ModuleNotFoundError` where the extra `longspan[report]`
    is not installed.
    """
    import jinja2
    from plotly.offline import get_plotlyjs

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("longspan.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    shown = content(rows) | {"problems": list(problems)}
    html = templates.get_template("page.html.j2").render(
        shown,
        plotly=get_plotlyjs(),
        script=_script,
        method_of=method_of,
        colour=lambda name: style(name)[0],
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    return path


def content(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the template shows, worked out from the rows."""
    rows = _latest(list(rows))
    run = next((row for row in rows if row.get("kind") == "run"), None)
    drawn = sections(rows)
    traces = [t for section in drawn for chart in section.charts for t in chart.figure["data"]]
    shown = {trace.get("legendgroup") for trace in traces}
    return {
        "summary": summary(rows),
        "stopped": run is not None and not any(row.get("kind") == "end" for row in rows),
        "legend": [method for method in STYLES if method in shown],
        "sections": drawn,
        "made": _made(rows),
        "environments": _environments(rows),
    }


def sections(rows: Rows) -> list[Section]:
    """Everything that can be drawn of the rows, machine by machine, then what was trained."""
    machines = list(dict.fromkeys(machine(row) for row in rows if row.get("kind") in _MEASURED))
    made: list[Section] = []
    for name in machines:
        here = [row for row in rows if machine(row) == name]
        where = f", {name}" if len(machines) > 1 else ""
        prefix = f"{slug(name)}-" if len(machines) > 1 else ""
        made += _measured(here, where, prefix)
    return [*made, *_demo(rows), *trained.sections(rows, "")]


_MEASURED = ("timing", "error", "spectrum", "projection")


def _measured(rows: Rows, where: str, prefix: str) -> list[Section]:
    timed = [row for row in rows if row.get("kind") in _KNOWN]
    made: list[Section] = []
    suites = dict.fromkeys(row.get("suite", _DEMO) for row in timed)
    for suite in sorted(suites, key=lambda name: (name != "length", name != _DEMO)):
        if suite in ("linformer", "model"):
            continue
        chosen = [row for row in timed if row.get("suite", _DEMO) == suite]
        usual = suite in ("length", _DEMO)
        title = where if usual else f"{where}, suite {suite}"
        made += timing.sections(chosen, title, prefix if usual else f"{prefix}{slug(suite)}-")

    def of(suite: str, kind: str) -> Rows:
        return [r for r in rows if r.get("kind") == kind and r.get("suite", suite) == suite]

    return [
        *made,
        *quality.frontier(of("error", "error"), where, prefix),
        *grids.linformer([r for r in timed if r.get("suite") == "linformer"], where, prefix),
        *grids.model([r for r in timed if r.get("suite") == "model"], where, prefix),
        *quality.spectrum(of("spectrum", "spectrum"), where, prefix),
        *quality.projection(of("spectrum", "projection"), where, prefix),
    ]


def _latest(rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of rows with one key on one machine the last; of demos, which have none, the last run."""
    runs = [number for number, row in enumerate(rows) if row.get("kind") == "run"]
    begin = runs[-1] if runs else 0
    last = {(row["key"], machine(row)): n for n, row in enumerate(rows) if "key" in row}
    return [
        row
        for n, row in enumerate(rows)
        if (last[row["key"], machine(row)] == n if "key" in row else n >= begin or "suite" in row)
    ]


def _demo(rows: Rows) -> list[Section]:
    training: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("kind") == "training" and not trained.is_trained(row) and "step" in row:
            training.setdefault(row["method"], []).append(row)
    if not training:
        return []
    about = next(iter(training.values()))[0]
    charts = [
        Chart(
            "accuracy",
            accuracy_chart(training, about["chance"]),
            "Correct answers on documents never trained on, against seconds of training.",
        ),
        Chart("loss", loss_chart(training), "Training loss, against steps."),
    ]
    lines = []
    for method, taken in training.items():
        row = taken[-1]
        right = "–" if row["accuracy"] is None else f"{row['accuracy']:.1%}"
        options = ", ".join(f"{k}={v}" for k, v in row.get("options", {}).items())
        seconds = f"{row['seconds']:.1f}"
        lines.append([method, right, f"{row['loss']:.3f}", str(row["step"]), seconds, options])
    head = ["method", "correct answers", "loss", "steps", "seconds", "options"]
    return [
        Section(
            "Training on a task that needs long range",
            f"{about.get('description', '')} Guessing is right in {about['chance']:.1%} of cases. "
            f"Every method sees the same {about['steps']} batches of {about['batch']} documents; "
            "seconds count training alone, without the checks on held-out documents.",
            charts,
            [Table(head, lines)],
        )
    ]


def _made(rows: Rows) -> list[tuple[str, str]]:
    """Every command with what it made; a demo names its command once, in its first row."""
    demo = next((str(row.get("command", "")) for row in rows if row.get("kind") == "run"), "")
    counts = Counter(
        (command, machine(row), row.get("environment", {}).get("time", "")[:10])
        for row in rows
        if (command := row.get("command") or ("" if "suite" in row else demo))
    )
    return [
        (command, ", ".join([f"{count} row{'s' * (count > 1)}", name, *([day] if day else [])]))
        for (command, name, day), count in counts.items()
    ]


def _environments(rows: Rows) -> list[dict[str, Any]]:
    """The machines and versions, each once, without the time."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        stamp = {k: v for k, v in row.get("environment", {}).items() if k != "time"}
        if stamp:
            found.setdefault(json.dumps(stamp, sort_keys=True), stamp)
    return list(found.values())


def _script(figure: Mapping[str, Any]) -> str:
    # "</script>" inside a string would end the script that carries the figure.
    return json.dumps(figure, separators=(",", ":")).replace("</", "<\\/")
