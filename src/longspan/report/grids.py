"""Linformer's grid of length and projected length, and whole encoders."""

from __future__ import annotations

from collections.abc import Mapping

from longspan.report import published
from longspan.report.charts import EXACT, LENGTH, level, line_chart
from longspan.report.crossover import table, times
from longspan.report.section import (
    Chart,
    Rows,
    Section,
    Table,
    busy,
    milliseconds,
    slug,
    times_as,
)

Values = Mapping[str, Mapping[int, float]]
_BASES = {EXACT: "fused exact attention", "eager": "eager exact attention, as the paper had it"}


def linformer(rows: Rows, where: str, prefix: str) -> list[Section]:
    """Speed-up and memory saving over exact attention, fused and eager, beside the paper's."""
    seconds, memory = times(rows, "forward"), table(rows, "forward", "peak_bytes")
    sizes = sorted(int(name.partition("-")[2]) for name in seconds if name.startswith("linformer-"))
    if not sizes:
        return []
    lines, dashed = {}, {}
    for base, dash in ((EXACT, "solid"), ("eager", "dot")):
        for size in sizes:
            name = f"linformer-{size}" + (" / eager" if base == "eager" else "")
            found = _gain(seconds, base, size)
            if found:
                lines[name], dashed[name] = found, dash
    figure = line_chart(lines, LENGTH, "times as fast as exact attention", dashed=dashed)
    figure["layout"]["shapes"] = [level(1)]
    for trace in figure["data"]:  # one colour for all, so darkness tells the projected length
        place = sizes.index(int(trace["name"].split()[0].partition("-")[2]))
        shade = _SHADES[min(place, len(_SHADES) - 1)]
        trace["line"]["color"] = trace["marker"]["color"] = shade
    tables = []
    for what, values, part in (("Speed-up", seconds, 0), ("Memory saving", memory, 1)):
        for base, words in _BASES.items():
            grid = {size: _gain(values, base, size) for size in sizes}
            tables.append(_grid(f"{what} over {words}", grid, sizes))
        paper = {
            size: {
                n: row[size][part]
                for n, row in published.LINFORMER.items()
                if size in row and n in seconds[f"linformer-{size}"]
            }
            for size in sizes
        }
        tables.append(_grid(f"{what}, published (V100, whole model)", paper, sizes))
    return [
        Section(
            f"Linformer: length by projected length{where}",
            "Attention alone, forward: time (and memory that a call adds) of exact attention "
            "divided by Linformer's. Solid: against torch's fused kernels; dotted: against eager "
            "attention, the paper's baseline. The paper's memory saving is a ratio of largest "
            f"batches.{busy(rows)}",
            [Chart(f"{prefix}linformer", figure, "The darker, the longer the projection.")],
            [found for found in tables if found.lines],
        )
    ]


_SHADES = ("#66c2a4", "#41ae76", "#238b45", "#006d2c", "#00441b")


def _gain(values: Values, base: str, size: int) -> dict[int, float]:
    other = values.get(f"linformer-{size}", {})
    return {
        n: values[base][n] / x for n, x in sorted(other.items()) if x and n in values.get(base, {})
    }


def _grid(title: str, grid: Mapping[int, Mapping[int, float]], sizes: list[int]) -> Table:
    lengths = sorted({n for column in grid.values() for n in column})
    lines = [
        [f"{n:,}", *(times_as(grid[s][n]) if n in grid[s] else "" for s in sizes)] for n in lengths
    ]
    return Table(["tokens", *(f"k = {size}" for size in sizes)], lines, title)


def model(rows: Rows, where: str, prefix: str) -> list[Section]:
    """Tokens a second and the largest batch of whole encoders, by size and mode."""
    made = []
    for layers, width in sorted({(row["layers"], row["width"]) for row in rows}):
        chosen = [row for row in rows if (row["layers"], row["width"]) == (layers, width)]
        charts, tables = [], []
        for mode, words in (("forward", "inference"), ("forward+backward", "training step")):
            seconds = times(chosen, mode)
            if not seconds:
                continue
            rate = {m: {n: n / t for n, t in sorted(found.items())} for m, found in seconds.items()}
            figure = line_chart(rate, LENGTH, "tokens a second")
            caption = f"{words.capitalize()}."
            charts.append(Chart(f"{prefix}model-{width}-{slug(words)}", figure, caption))
            lengths = sorted({n for found in seconds.values() for n in found})
            largest = {
                (row["name"], row["length"]): row.get("largest_batch")
                for row in chosen
                if row["kind"] == "timing" and row["mode"] == mode
            }

            def cell(name: str, n: int, seconds: Values = seconds, most: dict = largest) -> str:
                if n not in seconds[name]:
                    return ""
                batch = most.get((name, n))
                fits = "" if batch is None else f" ({batch:,})"
                return f"{milliseconds(seconds[name][n])}{fits}"

            lines = [[name, *(cell(name, n) for n in lengths)] for name in seconds]
            caption = f"Milliseconds a sequence, {words} (largest batch)"
            tables.append(Table(["tokens", *(f"{n:,}" for n in lengths)], lines, caption))
        if charts:
            made.append(
                Section(
                    f"A whole encoder: {layers} layers of {width}{where}",
                    "A training step is forward, backward and AdamW. The largest batch is what 95 "
                    "% of the memory holds, if every sequence takes what those measured took."
                    + busy(chosen),
                    charts,
                    tables,
                )
            )
    return made
