"""Error against cost, spectra of attention, and what Linformer's E learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspan.report.charts import EXACT, heat_map, line_chart, trace
from longspan.report.section import Chart, Rows, Section, Table, busy, milliseconds, slug

_INPUTS = {
    "real": "queries, keys and values of {model} reading {text}",
    "clustered": "queries and keys around 32 centres a head",
    "spread": "Gaussian queries and keys, the hardest: nothing stands out",
}
_AGAINST = {
    "error_softmax": "Against exact attention, rows scaled to length one.",
    "error_limit": "Against the method's own limit: yoso's expectation, exact attention otherwise.",
}


def frontier(rows: Rows, where: str, prefix: str) -> list[Section]:
    """Error against milliseconds, a chart for each kind of inputs and measure of error."""
    charts = []
    cells: dict[str, dict[str, list[str]]] = {}  # by name, then by inputs
    for inputs, words in _INPUTS.items():
        chosen = [row for row in rows if row["inputs"] == inputs]
        if not chosen:
            continue
        newest = chosen[-1]
        shape = ("length", "heads", "head_dim", "dtype")
        alike = [row for row in chosen if all(row.get(x) == newest.get(x) for x in shape)]
        last = {row["name"]: row for row in alike}
        about = {"model": "a model", "text": "a text"} | dict(newest)
        sizes = f"{newest['length']:,} tokens, {newest['heads']} heads of {newest['head_dim']}"
        for field, against in _AGAINST.items():
            charts.append(
                Chart(
                    f"{prefix}error-{inputs}-{slug(field)[6:]}",
                    _frontier(list(last.values()), field),
                    f"{inputs.capitalize()}: {words.format(**about)}; {sizes}. {against}",
                )
            )
        for row in last.values():
            cells.setdefault(row["name"], {})[inputs] = [
                milliseconds(row["seconds"] / row.get("batch", 1)),
                f"{row['error_limit']:.0%}",
                f"{row['error_softmax']:.0%}",
            ]
    if not charts:
        return []
    return [
        Section(
            f"Error against cost{where}",
            "‖y − y*‖ / ‖y*‖ of the output, nothing trained: to the left is cheaper, below is "
            "nearer. The dotted line is the time of exact attention: what is right of it has no "
            "use. A model trained with a method adapts to it; a converted one starts from these "
            f"errors.{busy(rows)}",
            charts,
            [_table(cells)],
        )
    ]


def _table(cells: Mapping[str, Mapping[str, list[str]]]) -> Table:
    kinds = [inputs for inputs in _INPUTS if any(inputs in found for found in cells.values())]
    parts = ("ms a sequence", "error, own limit", "error, softmax")
    head = ["", *(f"{inputs}: {part}" for inputs in kinds for part in parts)]
    lines = [
        [name, *(cell for inputs in kinds for cell in found.get(inputs, [""] * len(parts)))]
        for name, found in cells.items()
    ]
    return Table(head, lines)


def _frontier(rows: Rows, field: str) -> dict[str, Any]:
    lines: dict[str, dict[float, float]] = {}
    names: dict[str, list[str]] = {}
    for row in rows:
        family = row.get("family", row["method"])
        if row["method"] != EXACT and row[field] > 0:
            cost = 1000 * row["seconds"] / row.get("batch", 1)
            lines.setdefault(family, {})[cost] = row[field]
            options = ", ".join(f"{k}={v}" for k, v in row["options"].items())
            names.setdefault(family, []).append(options)
    figure = line_chart(lines, "milliseconds a sequence", "relative error")
    for made in figure["data"]:
        made["text"] = names[made["name"]]
        made["hovertemplate"] = (
            f"<b>{made['name']}</b> %{{text}}<br>%{{x:.3~g}} ms: %{{y:.3~g}}<extra></extra>"
        )
    exact = [row for row in rows if row["method"] == EXACT]
    errors = [error for line in lines.values() for error in line.values()]
    if exact and errors:
        x = [1000 * exact[-1]["seconds"] / exact[-1].get("batch", 1)] * 2
        look = {"color": "#222222", "width": 2, "dash": "dot"}
        ends = [min(errors), max(errors)]
        figure["data"].append(trace(EXACT, x, ends, mode="lines", line=look, note="its time"))
    return figure


def spectrum(rows: Rows, where: str, prefix: str) -> list[Section]:
    """Cumulative singular values by layer, and a heat map by layer and head."""
    last = {(row["weights"], row["layer"]): row for row in rows}
    if not last:
        return []
    lines, dashed = {}, {}
    for (weights, layer), row in sorted(last.items()):
        name = f"layer {layer}" + ("" if weights == "trained" else ", random weights")
        heads = row["cumulative"]
        mean = [sum(column) / len(heads) for column in zip(*heads, strict=True)]
        lines[name] = dict(zip(row["places"], mean, strict=True))
        dashed[name] = "solid" if weights == "trained" else "dot"
    figure = line_chart(
        lines, "largest singular values", "share of their sum", log="x", dashed=dashed
    )
    layers = sorted({layer for _, layer in last})
    for made in figure["data"]:
        place = layers.index(int(made["name"].split(",")[0].split()[1]))
        shade = _shade(place / max(1, len(layers) - 1))
        made["line"]["color"] = made["marker"]["color"] = shade
        made["marker"]["size"], made["marker"]["symbol"] = 4, "circle"
    first = next(iter(last.values()))
    charts = [Chart(f"{prefix}spectrum", figure, "Mean over heads; dotted: random weights.")]
    for weights in ("trained", "random"):
        z = [row["at_quarter"] for (w, _), row in sorted(last.items()) if w == weights]
        if z:
            made = heat_map(z, "head", "layer", low=0.5, high=1.0)
            caption = f"Share of the largest {first['length'] // 4}, {weights} weights."
            charts.append(Chart(f"{prefix}spectrum-{weights}", made, caption))
    return [
        Section(
            f"Is attention of low rank?{where}",
            f"Singular values of the {first['length']} × {first['length']} attention matrices of "
            f"{first['model']} on {first['text']}: the share of their sum that the largest have, "
            "as in figure 1 of the Linformer paper. A matrix whose curve rises at once is nearly "
            "of low rank. Random weights show how much of that is no achievement of training.",
            charts,
        )
    ]


def projection(rows: Rows, where: str, prefix: str) -> list[Section]:
    """What the rows of a fitted E look like."""
    last = {row["layer"]: row for row in rows}
    if not last:
        return []
    lines = []
    for layer, row in sorted(last.items()):
        learned = f"{row['error_before']:.0%} → {row['error_after']:.0%}"
        for name, field in (("before", "untrained"), ("E after", "trained"), ("F after", _VALUES)):
            if field in row:
                numbers = (f"{row[field][key]:{f}}" for key, f in _DESCRIBED.items())
                lines.append([f"layer {layer}, {name}", *numbers, learned * (name == "before")])
    first = next(iter(last.values()))
    size = first["options"]["projected_length"]
    charts = [
        Chart(
            f"{prefix}projection-{name.lower()}-{layer}",
            heat_map(row[field], "tokens, coarse", "rows, by place", low=0),
            f"|{name}|, layer {layer}.",
        )
        for layer, row in sorted(last.items())
        for name, field in (("E", "picture"), ("F", "picture_values"))
        if layer in (min(last), max(last)) and field in row
    ]
    head = ["", "entropy / log N", "support (tokens)", "likeness to a mean", "error"]
    return [
        Section(
            f"What Linformer's E learns{where}",
            f"E and F of {size} × {first['length']} fitted, layer by layer, so that Linformer "
            f"gives exact attention's output for {first['model']} on {first['text']} "
            f"({first['steps']} steps of Adam). Entropy 1 is a row that looks everywhere alike; "
            "support is its exponential, in tokens; likeness is the largest cosine of a row with a "
            "mean of neighbours; the error is on text that was not fitted.",
            charts,
            [Table(head, lines)],
        )
    ]


_VALUES = "trained_values"
_DESCRIBED = {"entropy": ".2f", "support": ".0f", "likeness": ".2f"}


def _shade(share: float) -> str:
    """From light to dark blue."""
    light, dark = (0x9E, 0xCA, 0xE1), (0x08, 0x30, 0x6B)
    mixed = (round(a + share * (b - a)) for a, b in zip(light, dark, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)
