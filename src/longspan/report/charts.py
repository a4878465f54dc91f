"""Charts as plain plotly figures (dictionaries of data and layout), one look for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longspan.report.crossover import crossover, exact_seconds

Figure = dict[str, Any]
EXACT = "softmax"

# Okabe and Ito's colours, readable for all kinds of colour vision; their yellow is too pale for a
# line on white, so an olive stands in. Symbols tell methods apart where colours cannot.
_STYLES = {
    "softmax": ("#222222", "square"),
    "yoso": ("#d55e00", "circle"),
    "yoso_expectation": ("#e69f00", "circle-open"),
    "nystrom": ("#0072b2", "diamond"),
    "linformer": ("#009e73", "triangle-up"),
    "window": ("#cc79a7", "triangle-down"),
    "strided": ("#56b4e9", "x"),
    "reformer": ("#7f6a00", "cross"),
}
_INK, _FAINT = "#333333", "#e6e6e6"


def style(method: str) -> tuple[str, str]:
    """Colour and marker symbol of a method, the same in every chart and table."""
    return _STYLES.get(method, ("#888888", "star"))


def time_chart(times: Mapping[str, Mapping[int, float]]) -> Figure:
    """Milliseconds against length, both logarithmic.

    Exact attention goes on as a dotted line where it was stopped; rings mark where each method
    overtakes it.
    """
    lengths = sorted({n for seconds in times.values() for n in seconds})
    exact = times.get(EXACT, {})
    data = []
    beyond = [n for n in lengths if exact and n >= max(exact)]
    if len(beyond) > 1:
        y = [1000 * exact_seconds(exact, n) for n in beyond]
        line = {"color": style(EXACT)[0], "width": 2, "dash": "dot"}
        data.append(_trace(EXACT, beyond, y, mode="lines", line=line, note="extrapolated"))
    for method, seconds in times.items():
        measured = sorted(seconds)
        data.append(_trace(method, measured, [1000 * seconds[n] for n in measured]))
    for method, seconds in times.items():
        point = crossover(exact, seconds) if method != EXACT else None
        if point and point.length and point.seconds and point.length > point.first:
            ring = {"color": style(method)[0], "size": 16, "symbol": "circle-open"}
            look = {"mode": "markers", "marker": {**ring, "line": {"width": 2}}}
            x, y = [point.length], [1000 * point.seconds]
            data.append(_trace(method, x, y, note="overtakes exact attention", **look))
    labels = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths]
    x_axis = {"type": "log", "tickvals": lengths, "ticktext": labels, "title": "length (tokens)"}
    y_axis = {"type": "log", "title": "milliseconds", "dtick": 1, "exponentformat": "none"}
    return {"data": data, "layout": _layout(x_axis, y_axis)}


def accuracy_chart(training: Mapping[str, Sequence[Mapping[str, Any]]], chance: float) -> Figure:
    """Accuracy on held-out data against seconds of training, with the level of guessing."""
    data = []
    for method, rows in training.items():
        known = [row for row in rows if row.get("accuracy") is not None]
        x = [row["seconds"] for row in known]
        data.append(_trace(method, x, [100 * row["accuracy"] for row in known]))
    y_axis = {"title": "correct answers (%)", "range": [0, 104]}
    layout = _layout({"title": "seconds of training", "rangemode": "tozero"}, y_axis)
    guessing = 100 * chance
    line = {"dash": "dot", "width": 1.5, "color": "#777777"}
    across = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": guessing, "y1": guessing}
    layout["shapes"] = [{**across, "line": line}]
    place = {"xref": "paper", "x": 1, "xanchor": "right", "y": guessing, "yanchor": "bottom"}
    layout["annotations"] = [{**place, "text": "guessing", "showarrow": False}]
    return {"data": data, "layout": layout}


def loss_chart(training: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Training loss against steps: the same data for every method."""
    data = []
    for method, rows in training.items():
        x, y = [row["step"] for row in rows], [row["loss"] for row in rows]
        data.append(_trace(method, x, y, mode="lines"))
    y_axis = {"title": "loss", "rangemode": "tozero"}
    return {"data": data, "layout": _layout({"title": "step", "rangemode": "tozero"}, y_axis)}


def _trace(
    method: str, x: Sequence[float], y: Sequence[float], *, note: str = "", **look: Any
) -> Figure:
    colour, symbol = style(method)
    return {
        "type": "scatter",
        "name": method,
        "mode": "lines+markers",
        "x": [float(f"{value:.5g}") for value in x],
        "y": [float(f"{value:.5g}") for value in y],
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "symbol": symbol, "size": 8},
        "hovertemplate": f"<b>{method}</b> {note}<br>%{{x:,.4~g}}: %{{y:,.3~g}}<extra></extra>",
        **look,
    }


def _layout(x_axis: Figure, y_axis: Figure) -> Figure:
    common = {
        "gridcolor": _FAINT,
        "linecolor": _INK,
        "ticks": "outside",
        "tickcolor": _INK,
        "showline": True,
        "zeroline": False,
        "automargin": True,
    }
    return {
        "xaxis": {**common, **x_axis, "title": {"text": x_axis["title"]}},
        "yaxis": {**common, **y_axis, "title": {"text": y_axis["title"]}},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": _INK},
        "margin": {"l": 8, "r": 16, "t": 12, "b": 8},
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
    }
