"""The page's charts as files, drawn by matplotlib from the same figures."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longspan.report.section import Chart

MARKERS = {
    "square": "s",
    "circle": "o",
    "diamond": "D",
    "triangle-up": "^",
    "triangle-down": "v",
    "x": "X",
    "cross": "P",
    "star": "*",
}
_LINES = {"dash": "--", "dot": ":", "solid": "-"}
FORMATS = ("png", "svg")


def write_pictures(
    charts: Sequence[Chart], folder: str | os.PathLike[str], formats: Sequence[str] = FORMATS
) -> list[Path]:
    """Draw every chart into `folder`, as `id.png` and `id.svg`, and return the files.

    Raises `ModuleNotFoundError` where matplotlib is not installed.
    """
    from matplotlib import rc_context

    Path(folder).mkdir(parents=True, exist_ok=True)
    files = []
    # A salt of its own keeps the ids in an SVG the same on every run; text stays text.
    with rc_context({"svg.hashsalt": "longspan", "svg.fonttype": "none"}):
        for chart in charts:
            figure = draw(chart)
            for ending in formats:
                path = Path(folder) / f"{chart.id}.{ending}"
                stamp = {"png": "Software", "svg": "Date"}[ending]
                figure.savefig(path, dpi=130, metadata={stamp: None})
                files.append(path)
    return files


def draw(chart: Chart) -> Any:
    """A matplotlib figure of a chart: lines with a legend beside them, or a heat map."""
    from matplotlib.figure import Figure

    data, layout = chart.figure["data"], chart.figure["layout"]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for letter in "xy":
        _axis(axes, letter, layout[f"{letter}axis"])
    if data and data[0]["type"] == "heatmap":
        _heat(figure, axes, data[0])
    else:
        seen: set[str] = set()
        for trace in data:
            _line(axes, trace, seen)
        for shape in layout.get("shapes", ()):
            axes.axhline(shape["y0"], color=shape["line"]["color"], linestyle=":", linewidth=1.2)
        axes.grid(color="#e6e6e6")
        _fit(axes, data)
        if seen:
            figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _axis(axes: Any, letter: str, axis: Mapping[str, Any]) -> None:
    from matplotlib.ticker import NullLocator

    getattr(axes, f"set_{letter}label")(axis["title"]["text"])
    mine = getattr(axes, f"{letter}axis")
    if axis.get("type") == "log":
        getattr(axes, f"set_{letter}scale")("log")
    if "tickvals" in axis:
        mine.set_ticks(axis["tickvals"], axis["ticktext"])
        mine.set_minor_locator(NullLocator())
    if "range" in axis:
        getattr(axes, f"set_{letter}lim")(axis["range"])


def _fit(axes: Any, data: Sequence[Mapping[str, Any]]) -> None:
    """Ticks outside of what was measured would widen logarithmic axes."""
    for letter in "xy":
        values = [value for trace in data for value in trace[letter]]
        if values and getattr(axes, f"get_{letter}scale")() == "log":
            getattr(axes, f"set_{letter}lim")(min(values) / 1.25, max(values) * 1.25)


def _line(axes: Any, trace: Mapping[str, Any], seen: set[str]) -> None:
    marker, line = trace["marker"], trace["line"]
    symbol = marker["symbol"]
    ring = marker.get("line") is not None
    lines, markers = "lines" in trace["mode"], "markers" in trace["mode"]
    named = markers and not ring and trace["name"] not in seen
    if named:
        seen.add(trace["name"])
    axes.plot(
        trace["x"],
        trace["y"],
        color=line["color"],
        linewidth=1.6,
        linestyle=_LINES[line.get("dash", "solid")] if lines else "none",
        marker=MARKERS[symbol.removesuffix("-open")] if markers else None,
        markersize=11 if ring else 5,
        markerfacecolor="none" if ring else "white" if symbol.endswith("-open") else line["color"],
        label=trace["name"] if named else None,
    )


def _heat(figure: Any, axes: Any, trace: Mapping[str, Any]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("longspan", [c for _, c in trace["colorscale"]])
    drawn = axes.imshow(
        trace["z"], origin="lower", aspect="auto", cmap=colours, vmin=trace["zmin"],
        vmax=trace["zmax"], interpolation="nearest",
    )  # fmt: skip
    figure.colorbar(drawn, ax=axes)
