"""Time and memory over length: crossover, times, memory, the Nyströmformer paper's table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspan.report import published
from longspan.report.charts import EXACT, LENGTH, line_chart, ratio_chart, time_chart
from longspan.report.crossover import crossover, label, table, times
from longspan.report.section import (
    Chart,
    Rows,
    Section,
    Table,
    busy,
    milliseconds,
    number,
    slug,
)

MODES = {
    "forward": "forward pass (inference)",
    "forward+backward": "forward and backward pass (training)",
}
_MB = 1 << 20


def sections(rows: Rows, where: str, prefix: str) -> list[Section]:
    """The sections of timing rows of one machine and shape; `where` ends their titles."""
    modes = [mode for mode in MODES if times(rows, mode)]
    if not modes:
        return []
    made = [_crossover(rows, modes, where, prefix), _time(rows, modes, where, prefix)]
    if any(table(rows, mode, "peak_bytes") for mode in modes):
        made.append(_memory(rows, modes, where, prefix))
    if "nystrom-64" in times(rows, "forward"):
        made.append(_paper(rows, where))
    return made


def shape(rows: Rows) -> str:
    """Heads, dtype and batch in words."""
    timed = [row for row in rows if row.get("kind") == "timing"]
    first = timed[0]
    batches = sorted({row.get("batch", 1) for row in timed})
    batch = f"{batches[0]}" if len(batches) == 1 else f"{batches[0]} to {batches[-1]}"
    per = "" if batches == [1] else "; times and memory are those of one sequence of the batch"
    heads = f"{first.get('heads', '?')} heads of {first.get('head_dim', '?')}"
    return f"Batch {batch}, {heads}, {first.get('dtype', '?')}, on {first.get('device', '?')}{per}."


def _crossover(rows: Rows, modes: list[str], where: str, prefix: str) -> Section:
    charts = []
    points: dict[str, list[str]] = {}
    for number_of, mode in enumerate(modes):
        measured = times(rows, mode)
        caption = f"{MODES[mode].capitalize()}."
        charts.append(Chart(f"{prefix}crossover-{slug(mode)}", ratio_chart(measured), caption))
        for name in measured:
            if name != EXACT:
                cells = points.setdefault(name, [""] * len(modes))
                point = crossover(measured.get(EXACT, {}), measured[name])
                cells[number_of] = "not compared" if point is None else str(point)
    lines = [[name, *cells] for name, cells in points.items()]
    tables = [Table(["", *modes], lines, "Faster than exact attention from (tokens)")]
    return Section(
        f"From which length it pays{where}",
        f"{shape(rows)} How many times as fast as exact attention ({EXACT}, through torch's fused "
        "kernels) each method is: above the dotted line it is faster.",
        [chart for chart in charts if chart.figure["data"]],
        tables if lines else [],
    )


def _time(rows: Rows, modes: list[str], where: str, prefix: str) -> Section:
    charts, tables = [], []
    for mode in modes:
        measured = times(rows, mode)
        charts.append(
            Chart(
                f"{prefix}time-{slug(mode)}", time_chart(measured), f"{MODES[mode].capitalize()}."
            )
        )
        tables.append(_grid(rows, mode, measured, milliseconds, f"Milliseconds, {MODES[mode]}"))
    return Section(
        f"Time{where}",
        f"{shape(rows)} Medians of interleaved runs; both axes are logarithmic. Dotted: exact "
        "attention continued with the square of the length, where it was stopped. Rings: the "
        f"length from which a method is faster.{busy(rows)}",
        charts,
        tables,
    )


def _memory(rows: Rows, modes: list[str], where: str, prefix: str) -> Section:
    charts, tables = [], []
    for mode in modes:
        measured = {
            name: {n: max(value / _MB, 0.01) for n, value in sorted(values.items())}
            for name, values in table(rows, mode, "peak_bytes").items()
        }
        figure = line_chart(measured, LENGTH, "MB of a sequence")
        charts.append(Chart(f"{prefix}memory-{slug(mode)}", figure, f"{MODES[mode].capitalize()}."))
        tables.append(_grid(rows, mode, measured, number, f"MB, {MODES[mode]}"))
    return Section(
        f"Memory{where}",
        "Peak memory that a call adds to what was there before, its results included: on a GPU "
        "that of torch's allocator, on a CPU the growth of the process.",
        charts,
        tables,
    )


def _grid(
    rows: Rows, mode: str, measured: Mapping[str, Mapping[int, float]], write: Any, caption: str
) -> Table:
    stopped = {
        (label(row), row["length"]): str(row.get("reason", "stopped"))
        for row in rows
        if row.get("kind") == "stopped" and row["mode"] == mode
    }
    lengths = sorted({n for values in measured.values() for n in values})

    def cell(name: str, length: int) -> str:
        if length in measured[name]:
            return str(write(measured[name][length]))
        reason = stopped.get((name, length))
        return "" if reason is None else "no memory" if "memory" in reason else "stopped"

    lines = [[name, *(cell(name, length) for length in lengths)] for name in measured]
    return Table(["tokens", *(f"{n:,}" for n in lengths)], lines, caption)


def _paper(rows: Rows, where: str) -> Section:
    seconds, memory = times(rows, "forward"), table(rows, "forward", "peak_bytes")
    columns = [name for name in published.NYSTROM_COLUMNS if name in seconds]
    lines = []
    for length, cells in published.NYSTROM.items():
        paper = dict(zip(published.NYSTROM_COLUMNS, cells, strict=True))
        here = [_cell(seconds, memory, name, length) for name in columns]
        if any(here):
            lines.append([f"{length:,}, here", *here])
            lines.append([f"{length:,}, paper", *(paper[name] for name in columns)])
    return Section(
        f"The table of the Nyströmformer paper, today{where}",
        "MB and milliseconds of one forward pass of self-attention, a sequence. The paper timed a "
        "GTX 1080 Ti against exact attention with its N × N weights in memory (eager); softmax "
        "here is fused. Its memory counts the whole module, ours what a call adds.",
        tables=[Table(["tokens", *columns], lines, "MB / ms")],
    )


def _cell(
    seconds: Mapping[str, Mapping[int, float]],
    memory: Mapping[str, Mapping[int, float]],
    name: str,
    length: int,
) -> str:
    if length not in seconds.get(name, {}):
        return ""
    used = memory.get(name, {}).get(length)
    return f"{'–' if used is None else number(used / _MB)} / {milliseconds(seconds[name][length])}"
