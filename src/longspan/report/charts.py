"""Charts as plain plotly figures (dictionaries of data and layout), one look for all of them.

The page shows them with plotly, `longspan.report.pictures` draws the same ones with matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from longspan.report.crossover import crossover, exact_seconds

Figure = dict[str, Any]
EXACT = "softmax"
LENGTH = "length (tokens)"

# Okabe and Ito's colours, readable for all kinds of colour vision; their yellow is too pale for a
# line on white, so an olive stands in. Symbols tell methods apart where colours cannot.
STYLES = {
    "softmax": ("#222222", "square"),
    "yoso": ("#d55e00", "circle"),
    "yoso_expectation": ("#e69f00", "circle-open"),
    "nystrom": ("#0072b2", "diamond"),
    "linformer": ("#009e73", "triangle-up"),
    "window": ("#cc79a7", "triangle-down"),
    "strided": ("#56b4e9", "x"),
    "reformer": ("#7f6a00", "cross"),
    "eager": ("#888888", "square-open"),
}
_UNKNOWN = ("#888888", "star")
# Of several settings of a method these have the full line, others a dashed one and open markers.
_FULL = {"linformer-256", "window-257", "nystrom-64", "yoso-32", "linformer, means"}
_INK, _FAINT = "#333333", "#e6e6e6"


def method_of(name: str) -> str:
    """The method that a name begins with: "nystrom" of "nystrom-64"; the name if there is none."""
    known = [method for method in STYLES if name.startswith(method)]
    return max(known, key=len, default=name)


def style(name: str) -> tuple[str, str]:
    """Colour and marker symbol of a method, or of a name that begins with one, everywhere."""
    return STYLES.get(method_of(name), _UNKNOWN)


def main_setting(name: str) -> bool:
    """Whether a name stands for its method alone: the others of the method are dashed."""
    return name in STYLES or name in _FULL or method_of(name) == name


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
        data.append(trace(EXACT, beyond, y, mode="lines", line=line, note="extrapolated"))
    for name, seconds in times.items():
        measured = sorted(seconds)
        data.append(trace(name, measured, [1000 * seconds[n] for n in measured]))
    for name, seconds in times.items():
        point = crossover(exact, seconds) if name != EXACT else None
        if point and point.length and point.seconds and point.length > point.first:
            x, y = [point.length], [1000 * point.seconds]
            data.append(trace(name, x, y, note="overtakes exact attention", **ring(name)))
    y_axis = {"title": "milliseconds", **log_axis([y for made in data for y in made["y"]])}
    return {"data": data, "layout": layout(length_axis(lengths), y_axis)}


def ratio_chart(times: Mapping[str, Mapping[int, float]]) -> Figure:
    """How many times faster than exact attention, against length: the crossover is at 1.

    Where exact attention was not measured, its time is continued with the square of the length.
    """
    exact = times.get(EXACT, {})
    data, lengths = [], set()
    for name, seconds in times.items():
        common = sorted(n for n in seconds if n in exact or (exact and n > max(exact)))
        if name == EXACT or not common:
            continue
        lengths.update(common)
        data.append(trace(name, common, [exact_seconds(exact, n) / seconds[n] for n in common]))
    title = "times as fast as exact attention"
    y_axis = {"title": title, **log_axis([y for made in data for y in made["y"]])}
    made = layout(length_axis(sorted(lengths)), y_axis)
    made["shapes"] = [level(1)]
    return {"data": data, "layout": made}


def line_chart(
    lines: Mapping[str, Mapping[Any, float]],
    x_title: str,
    y_title: str,
    *,
    log: str = "xy",
    dashed: Mapping[str, str] | None = None,
) -> Figure:
    """Lines by name, through their points in the order given.

    `log` says which axes are logarithmic, `dashed` which dash a line has.
    """
    data = []
    for name, points in lines.items():
        made = trace(name, list(points), list(points.values()))
        if dashed and name in dashed:
            made["line"]["dash"] = dashed[name]
        data.append(made)
    axes = []
    for letter, title in (("x", x_title), ("y", y_title)):
        axis: Figure = {"title": title}
        if letter in log:
            axis |= log_axis([value for made in data for value in made[letter]])
        axes.append(axis)
    if x_title.startswith("length") and "x" in log:
        axes[0] = length_axis(sorted({int(x) for points in lines.values() for x in points}))
    return {"data": data, "layout": layout(*axes)}


def heat_map(
    z: Sequence[Sequence[float]],
    x_title: str,
    y_title: str,
    *,
    low: float | None = None,
    high: float | None = None,
) -> Figure:
    """Rows of numbers as colours, from white to dark blue; the first row is at the bottom."""
    data = {
        "type": "heatmap",
        "z": [[float(f"{value:.4g}") for value in row] for row in z],
        "colorscale": [[0, "#ffffff"], [0.5, "#56b4e9"], [1, "#08306b"]],
        "zmin": low,
        "zmax": high,
        "hovertemplate": f"{x_title} %{{x}}, {y_title} %{{y}}: %{{z:.3~g}}<extra></extra>",
        "colorbar": {"thickness": 12, "outlinewidth": 0},
    }
    return {"data": [data], "layout": layout({"title": x_title}, {"title": y_title})}


def accuracy_chart(training: Mapping[str, Sequence[Mapping[str, Any]]], chance: float) -> Figure:
    """Accuracy on held-out data against seconds of training, with the level of guessing."""
    data = []
    for method, rows in training.items():
        known = [row for row in rows if row.get("accuracy") is not None]
        x = [row["seconds"] for row in known]
        data.append(trace(method, x, [100 * row["accuracy"] for row in known]))
    y_axis = {"title": "correct answers (%)", "range": [0, 104]}
    made = layout({"title": "seconds of training", "rangemode": "tozero"}, y_axis)
    made["shapes"] = [level(100 * chance)]
    place = {"xref": "paper", "x": 1, "xanchor": "right", "y": 100 * chance, "yanchor": "bottom"}
    made["annotations"] = [{**place, "text": "guessing", "showarrow": False}]
    return {"data": data, "layout": made}


def loss_chart(training: Mapping[str, Sequence[Mapping[str, Any]]]) -> Figure:
    """Training loss against steps: the same data for every method."""
    data = []
    for method, rows in training.items():
        x, y = [row["step"] for row in rows], [row["loss"] for row in rows]
        data.append(trace(method, x, y, mode="lines"))
    y_axis = {"title": "loss", "rangemode": "tozero"}
    return {"data": data, "layout": layout({"title": "step", "rangemode": "tozero"}, y_axis)}


def trace(
    name: str, x: Sequence[float], y: Sequence[float], *, note: str = "", **look: Any
) -> Figure:
    """One line with markers, in the colour of its method."""
    colour, symbol = style(name)
    full = main_setting(name)
    return {
        "type": "scatter",
        "name": name,
        "legendgroup": method_of(name),
        "mode": "lines+markers",
        "x": [float(f"{value:.5g}") for value in x],
        "y": [float(f"{value:.5g}") for value in y],
        "line": {"color": colour, "width": 2, **({} if full else {"dash": "dash"})},
        "marker": {
            "color": colour,
            "symbol": symbol if full or symbol.endswith("-open") else f"{symbol}-open",
            "size": 8,
        },
        "hovertemplate": f"<b>{name}</b> {note}<br>%{{x:,.4~g}}: %{{y:,.3~g}}<extra></extra>",
        **look,
    }


def ring(name: str) -> Figure:
    """The look of a trace that rings points in the colour of a method."""
    marker = {"color": style(name)[0], "size": 16, "symbol": "circle-open", "line": {"width": 2}}
    return {"mode": "markers", "marker": marker}


def level(y: float) -> Figure:
    """A dotted line across the chart."""
    line = {"dash": "dot", "width": 1.5, "color": "#777777"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": line}


def log_axis(values: Sequence[float]) -> Figure:
    """A logarithmic axis with ticks at 1, 2 and 5, or at powers of ten where there are many."""
    axis: Figure = {"type": "log"}
    if values:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        digits = (1, 2, 5) if max(values) < 200 * min(values) else (1,)
        ticks = [float(f"{digit}e{power}") for power in range(low, high + 1) for digit in digits]
        axis |= {"tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}
    return axis


def length_axis(lengths: Sequence[int]) -> Figure:
    """A logarithmic axis of tokens, with a tick at every measured length."""
    labels = [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths]
    return {"type": "log", "tickvals": list(lengths), "ticktext": labels, "title": LENGTH}


def layout(x_axis: Figure, y_axis: Figure) -> Figure:
    """What all charts have in common."""
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
