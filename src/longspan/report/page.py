"""The page: what was measured, drawn and tabulated in one HTML file that needs no network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longspan.report.charts import EXACT, accuracy_chart, loss_chart, style, time_chart
from longspan.report.crossover import crossover, times
from longspan.report.summary import summary

Rows = list[Mapping[str, Any]]
_MODES = {
    "forward": "Time of a forward pass (inference)",
    "forward+backward": "Time of a forward and backward pass (training)",
}


def write_page(rows: Iterable[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Draw rows (timing, stopped, training, run, end) as one offline page, and return its path.

    Of several runs in the rows, the last is drawn, and whatever it did not measure is left out.
    Raises `ModuleNotFoundError` where the extra `longspan[report]` is not installed.
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
    html = templates.get_template("page.html.j2").render(content(rows), plotly=get_plotlyjs())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(html, encoding="utf-8")
    return path


def content(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the template shows, worked out from the rows of the last run."""
    rows = list(rows)
    runs = [number for number, row in enumerate(rows) if row.get("kind") == "run"]
    run = rows[runs[-1]] if runs else {}
    rows = rows[runs[-1] :] if runs else rows
    methods = list(dict.fromkeys(row["method"] for row in rows if "method" in row))
    return {
        "summary": summary(rows),
        "complete": any(row.get("kind") == "end" for row in rows),
        "legend": [(method, style(method)[0]) for method in methods],
        "exact": EXACT,
        "timings": [_timing(rows, mode) for mode in _MODES if times(rows, mode)],
        "training": _training(rows),
        "run": run,
        "environment": next((row["environment"] for row in rows if "environment" in row), {}),
    }


def _timing(rows: Rows, mode: str) -> dict[str, Any]:
    table = times(rows, mode)
    lengths = sorted({n for seconds in table.values() for n in seconds})
    stopped = {
        (row["method"], row["length"])
        for row in rows
        if row.get("kind") == "stopped" and row["mode"] == mode
    }
    shape = next(row for row in rows if row.get("kind") == "timing" and row["mode"] == mode)

    def cell(method: str, length: int) -> str:
        if length in table[method]:
            return milliseconds(table[method][length])
        return "stopped" if (method, length) in stopped else ""

    return {
        "title": _MODES[mode],
        "shape": shape,
        "chart": _script(time_chart(table)),
        "lengths": lengths,
        "rows": [
            {
                "method": method,
                "colour": style(method)[0],
                "cells": [cell(method, length) for length in lengths],
                "wins": _wins(table, method),
            }
            for method in table
        ],
    }


def _wins(table: Mapping[str, Mapping[int, float]], method: str) -> str:
    if method == EXACT:
        return "–"
    point = crossover(table.get(EXACT, {}), table[method])
    return "not compared" if point is None else str(point)


def _training(rows: Rows) -> dict[str, Any] | None:
    training: dict[str, Rows] = {}
    for row in rows:
        if row.get("kind") == "training":
            training.setdefault(row["method"], []).append(row)
    if not training:
        return None
    first = next(iter(training.values()))[0]
    last = {method: taken[-1] for method, taken in training.items()}
    return {
        "about": first,
        "accuracy": _script(accuracy_chart(training, first["chance"])),
        "loss": _script(loss_chart(training)),
        "rows": [
            {
                "method": method,
                "colour": style(method)[0],
                "accuracy": row["accuracy"],
                "loss": row["loss"],
                "seconds": row["seconds"],
                "step": row["step"],
                "options": ", ".join(f"{k}={v}" for k, v in row.get("options", {}).items()),
            }
            for method, row in last.items()
        ],
    }


def milliseconds(seconds: float) -> str:
    """Three significant digits, as "4.21", "42.1", "421" or "4,210"."""
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _script(figure: Mapping[str, Any]) -> str:
    # "</script>" inside a string would end the script that carries the figure.
    return json.dumps(figure, separators=(",", ":")).replace("</", "<\\/")
