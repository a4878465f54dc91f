"""Tables and a plot of the rows that `longspan.bench.gpu` writes.

    python -m longspan.report.gpu results/yoso-gpu.jsonl

writes results/yoso-gpu.md and, with matplotlib, results/yoso-gpu.png.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longspan import records
from longspan.report.charts import style
from longspan.report.pictures import MARKERS

THREAD = (
    "Backward passes, exact attention's too, run in the calling thread: docs/kernels.md says why."
)

Row = Mapping[str, Any]
MODES = {"forward": "Forward", "forward+backward": "Forward and backward"}
TOKEN_HEADS = 1 << 18
DTYPE = "bfloat16"  # of all but a few rows
PLOTTED_HEADS = 8
# Of the settings in the plot: marker filled, line.
_LINES = {
    "softmax cuDNN": (True, "-"),
    "softmax flash": (False, "--"),
    "yoso 32": (True, "-"),
    "yoso 16": (False, "--"),
}


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of every key, on the GPU of the last row."""
    rows = [row for row in rows if row.get("suite") == "yoso-gpu" and "key" in row]
    last = {row["key"]: row for row in rows if gpu_of(row) == gpu_of(rows[-1])}
    return sorted(last.values(), key=lambda row: row["length"])


def setting(row: Row) -> str:
    """Method and options in a few words, the same at every length."""
    options = row["options"]
    if row["method"] != "yoso":
        return str(row["name"])
    words = [f"yoso {options['num_hashes']}"]
    if options["hash_bits"] != 8:
        most = min(row["length"], 1 << 16)
        words.append("log2 n bits" if 1 << options["hash_bits"] == most else "other bits")
    if "backward_hashes" in options:
        words.append(f"backward_hashes={options['backward_hashes']}")
    if options["impl"] == "reference":
        words.append("reference")
    if row.get("graph"):
        words.append("graph")
    return ", ".join(words)


def markdown(rows: Iterable[Row]) -> str:
    """Time and ratio, crowded inputs, hashes, peak memory, slopes; empty without rows."""
    every = latest(rows)
    rows = [row for row in every if row["dtype"] == DTYPE]
    if not rows:
        return ""
    stamp = rows[-1]["environment"]
    parts = [
        f"# YOSO on one {stamp['gpu']}",
        f"torch {stamp['torch']}, {DTYPE}, {stamp['time'][:10]}. Made from the rows "
        "beside this file by `python -m longspan.report.gpu`; `make bench-gpu` measures them.",
        "`yoso 32` is 32 hashes of 8 bits through the fused kernels, with `log2 n bits` of that "
        "many instead, but no more than 16; `reference` is plain torch, timed at a few lengths "
        "only since it is slow. `yoso_expectation` looks at all pairs: modules compute it for "
        "short inputs. Every length has 2^18 token-heads, and at least eight heads.",
        "`graph` is a call captured once and replayed, which leaves the host out."
        if any(row.get("graph") for row in rows)
        else "",
        *notes(every),
        "## Time",
        "Milliseconds per 2^18 token-heads and, in brackets, the time of the faster exact kernel "
        "in the same run divided by it. Inputs spread out (Gaussian). " + THREAD,
    ]
    spread = [row for row in rows if row["inputs"] == "spread"]
    for title, chosen in _by_size(spread):
        parts += [f"### {title}", grid(chosen, _time)]
    parts += [
        "## Inputs that crowd into few buckets",
        "Time as above, and in brackets divided by that of spread-out inputs. `clustered`: 32 "
        "centres a head and noise of 0.35; `one-key`: all keys of a head equal; `one-vector`: all "
        "queries and keys of a head equal. Time per token that does not grow with n is linear.",
    ]
    base = {(setting(row), row["head_dim"], row["mode"], row["length"]): row for row in spread}

    def slowdown(row: Row) -> str:
        plain = base.get((setting(row), row["head_dim"], row["mode"], row["length"]))
        against = f" ({row['seconds'] / plain['seconds']:.2f}×)" if plain else ""
        return f"{milliseconds(row):.3f}{against}"

    for title, chosen in _by_size([row for row in rows if row["inputs"] != "spread"]):
        parts += [f"### {title}", grid(chosen, slowdown, _setting_and_inputs)]
    parts += ["## Half the hashes", "Time of 32 hashes divided by that of 16.", _halves(base)]
    if others := [row for row in every if row["dtype"] != DTYPE]:
        parts += ["## Other number types", "Heads of 64, spread-out inputs, otherwise as above."]
        for title, chosen in _by_size(others):
            parts += [f"### {title}, by number type", grid(chosen, _time, _setting_and_type)]
    parts += hosts([row for row in spread if row["head_dim"] == 64], setting)
    parts += [
        "## Peak memory",
        "Above inputs and outputs (forward: y; with backward: y, dq, dk, dv), in units of v.",
    ]
    for title, chosen in _by_size([row for row in spread if row["peak_bytes"] is not None]):
        parts += [f"### {title}", grid(chosen, lambda row: f"{_memory(row):.2f}")]
    parts += [
        "## Slope",
        "Of log time against log n from 8,192 tokens on, for a fixed number of heads and 64 "
        "channels: 1 is linear, 2 quadratic.",
        _slopes([row for row in spread if row["head_dim"] == 64]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def draw(rows: Iterable[Row], path: str | os.PathLike[str]) -> None:
    """Time of eight heads of 64 channels against length, both logarithmic, with a slope of 1."""
    from matplotlib.figure import Figure

    wanted = (64, "spread", DTYPE)
    rows = [r for r in latest(rows) if (r["head_dim"], r["inputs"], r["dtype"]) == wanted]
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, len(MODES), sharey=True)
    for axes, (mode, title) in zip(panels, MODES.items(), strict=True):
        for name, (filled, line) in _LINES.items():
            curve = _curve(rows, name, mode)
            colour, marker = look_of(name)
            face = colour if filled else "white"
            look: dict[str, Any] = dict(color=colour, linestyle=line, marker=marker)
            label = f"{name} hashes" if name.startswith("yoso") else name
            axes.plot(*zip(*curve, strict=True) if curve else ([], []), label=label, markersize=6,
                      markerfacecolor=face, **look)  # fmt: skip
        guide = _curve(rows, "yoso 32", mode)[-5:]
        if guide:
            ends = [guide[0][0], guide[-1][0]]
            level = 0.25 * min(y / x for x, y in guide)
            axes.plot(ends, [level * x for x in ends], color="#888888", linestyle=":")
            middle = math.sqrt(ends[0] * ends[1])
            axes.annotate("slope 1", (middle, level * middle), (4, -12), color="#666666",
                          textcoords="offset points")  # fmt: skip
        dress(axes, title, sorted({row["length"] for row in rows}))
    panels[0].set_ylabel(f"milliseconds for {PLOTTED_HEADS} heads of 64")
    panels[0].legend(frameon=False)
    gpu = gpu_of(rows[-1])
    about = f"{DTYPE}, 8-bit hashes, timed with 2^18 token-heads or more"
    figure.suptitle(f"Attention on one {gpu}: {about}", fontsize=12)
    figure.savefig(path, dpi=140, metadata={"Software": None})


def look_of(name: str) -> tuple[str, str]:
    """Colour and marker of a method, for matplotlib."""
    colour, symbol = style(name)
    return colour, MARKERS[symbol.removesuffix("-open")]


def dress(axes: Any, title: str, lengths: Sequence[int]) -> None:
    """Logarithmic axes over length, with a grid and no frame."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda n, _: f"{n / 1024:g}k" if n >= 1024 else f"{n:g}")
    )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("length (tokens)")


def notes(rows: Sequence[Row]) -> list[str]:
    """What rows say of themselves, each once, with how many say it."""
    notes = [row["note"] for row in rows if row.get("note")]
    return [f"Of {len(rows)} rows, {notes.count(n)}: {n}." for n in dict.fromkeys(notes)]


def _setting_and_inputs(row: Row) -> str:
    return f"{setting(row)}, {row['inputs']}"


def _setting_and_type(row: Row) -> str:
    return f"{setting(row)}, {row['dtype']}"


def gpu_of(row: Row) -> str | None:
    """The GPU that a row was measured on."""
    return row["environment"]["gpu"]


def milliseconds(row: Row) -> float:
    """Of 2^18 token-heads."""
    share = TOKEN_HEADS / (row["batch"] * row["heads"] * row["length"])
    return float(1000 * share * row["seconds"])


def hosts(rows: Iterable[Row], label: Callable[[Row], str]) -> list[str]:
    """A section on the time until calls returned; nothing where no row knows it."""
    known = [row for row in rows if row.get("host_seconds") and not row.get("graph")]
    parts = [
        "## The host",
        "Microseconds until a call returned, most of its kernels still to run, and in brackets the "
        "share of the call's time. Where that is near 100 %, the GPU waits for the host.",
    ]
    for mode, name in MODES.items():
        if chosen := [row for row in known if row["mode"] == mode]:
            parts += [f"### {name}, until it returned", grid(chosen, _host, label)]
    return parts if known else []


def _host(row: Row) -> str:
    return f"{1e6 * row['host_seconds']:.0f} ({row['host_seconds'] / row['seconds']:.0%})"


def _memory(row: Row) -> float:
    return float((row["peak_bytes"] - row["outputs_bytes"]) / row["v_bytes"])


def _time(row: Row) -> str:
    ratio = row["exact_seconds"] / row["seconds"]
    return f"{milliseconds(row):.3f} ({ratio:.{1 if ratio >= 10 else 2}f}×)"


def _by_size(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by mode and head dimension, with a title; empty ones are left out."""
    found = []
    for head_dim in sorted({row["head_dim"] for row in rows}):
        for mode, title in MODES.items():
            chosen = [row for row in rows if (row["head_dim"], row["mode"]) == (head_dim, mode)]
            if chosen:
                found.append((f"{title}, heads of {head_dim}", chosen))
    return found


def grid(
    rows: Sequence[Row], cell: Callable[[Row], str], label: Callable[[Row], str] = setting
) -> str:
    """A table with a line for each length and a column for each label."""
    columns = sorted({label(row) for row in rows}, key=_rank)
    cells = {(row["length"], label(row)): cell(row) for row in rows}
    lengths = sorted({row["length"] for row in rows})
    lines = [[f"{n:,}", *(cells.get((n, column), "") for column in columns)] for n in lengths]
    return _table(["n", *columns], lines)


def _rank(label: str) -> tuple[bool, int, str]:
    """Exact attention first, plain settings before longer ones."""
    return not label.startswith("softmax"), label.count(","), label


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, aligned to the right."""
    rule = ["---:"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *lines))


def _halves(base: Mapping[tuple[str, int, str, int], Row]) -> str:
    """Time of 32 hashes over that of 16, by length; columns are head dimensions and modes."""
    columns: dict[str, dict[int, str]] = {}
    for (name, head_dim, mode, length), row in base.items():
        first, graph, _ = name.partition(", graph")
        other = base.get((f"yoso 16{graph}", head_dim, mode, length))
        if first == "yoso 32" and other:
            ratio = f"{row['seconds'] / other['seconds']:.2f}×"
            columns.setdefault(f"d = {head_dim}, {mode}{graph}", {})[length] = ratio
    lengths = sorted({n for column in columns.values() for n in column})
    names = sorted(columns, key=lambda name: (len(name.split(",")[0]), name))
    lines = [[f"{n:,}", *(columns[name].get(n, "") for name in names)] for n in lengths]
    return _table(["n", *names], lines)


def _curve(rows: Iterable[Row], name: str, mode: str) -> list[tuple[int, float]]:
    """(length, milliseconds of eight heads), by length."""
    return [
        (row["length"], 1000 * row["seconds"] * PLOTTED_HEADS / (row["batch"] * row["heads"]))
        for row in rows
        if setting(row) == name and row["mode"] == mode
    ]


def _slopes(rows: Sequence[Row]) -> str:
    """The least-squares slope of each plotted curve."""
    lines = []
    for name in _LINES:
        cells = [name]
        for mode in MODES:
            points = [(math.log(n), math.log(y)) for n, y in _curve(rows, name, mode) if n >= 8192]
            cells.append(f"{_slope(points):.2f}" if len(points) > 1 else "")
        lines.append(cells)
    return _table(["", *MODES], lines)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def write(
    path: str | os.PathLike[str],
    markdown: Callable[[Sequence[Row]], str],
    draw: Callable[[Sequence[Row], Path], None],
) -> None:
    """Write the tables and the plot of a file of rows beside it, and say where."""
    rows = records.read(path)
    tables = Path(path).with_suffix(".md")
    text = markdown(rows)
    if not text:
        sys.exit(f"{path} must hold rows of the suite that this draws, got none")
    tables.write_text(text, encoding="utf-8")
    print(f"Wrote {tables}")
    if importlib.util.find_spec("matplotlib") is None:
        print("No plot: matplotlib is missing (pip install 'longspan[report]')")
        return
    draw(rows, tables.with_suffix(".png"))
    print(f"Wrote {tables.with_suffix('.png')}")


if __name__ == "__main__":
    write(sys.argv[1] if len(sys.argv) > 1 else "results/yoso-gpu.jsonl", markdown, draw)
