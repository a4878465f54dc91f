"""Tables and a plot of the rows that `longspan.bench.gpu_fused` writes.

    python -m longspan.report.fused results/fused-gpu.jsonl

writes results/fused-gpu.md and, with matplotlib, results/fused-gpu.png.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from longspan.report.gpu import (
    MODES,
    THREAD,
    Row,
    dress,
    gpu_of,
    grid,
    hosts,
    look_of,
    milliseconds,
    notes,
    write,
)

EXACT = ("softmax cuDNN", "softmax flash", "softmax, padded")
PLOTTED = ("softmax cuDNN", "yoso_expectation fused", "nystrom fused", "linformer fused",
           "window fused", "nystrom Hugging Face")  # fmt: skip


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of every name, mode and length, as a graph or not, on the last row's GPU."""
    rows = [row for row in rows if row.get("suite") == "fused-gpu"]
    mine = [row for row in rows if gpu_of(row) == gpu_of(rows[-1])]
    return list(
        {(row["name"], row["mode"], row["length"], _graph(row)): row for row in mine}.values()
    )


def markdown(rows: Iterable[Row]) -> str:
    """Time beside exact attention, and peak memory; empty without rows."""
    rows = latest(rows)
    if not rows:
        return ""
    stamp = rows[-1]["environment"]
    parts = [
        f"# Nyström, Linformer, YOSO's expectation and window on one {stamp['gpu']}",
        f"torch {stamp['torch']}, {rows[-1]['dtype']}, heads of {rows[-1]['head_dim']}, "
        f"{stamp['time'][:10]}. Made from the rows beside this file by `python -m "
        "longspan.report.fused`; `make bench-fused` measures them. `fused` is Triton, `reference` "
        "plain torch, `Hugging Face` the attention of its Nyströmformer, `convolution` that of 33 "
        "values which Nyströmformer adds, timed alone. 64 landmarks, 256 projected tokens, 8 bits, "
        "a window of 257. Every length has 2^18 token-heads, and at least eight heads.",
        "Milliseconds per 2^18 token-heads and, in brackets, the time of the faster exact kernel "
        "divided by it. At short lengths whole calls take as long as the host needs to launch "
        "them; exact attention is one launch. " + THREAD,
        *_runs(rows),
        *notes(rows),
    ]
    for mode, title in MODES.items():
        every = [row for row in rows if row["mode"] == mode and not _padded(row)]
        padded = [row for row in rows if row["mode"] == mode and _padded(row) and not _graph(row)]
        chosen = [row for row in every if not _graph(row)]
        parts += [f"## {title}", _times(chosen)]
        if graphs := [row for row in every if _graph(row)]:
            parts += [
                f"### {title}, as a CUDA graph",
                "The same calls, captured once and replayed: what the GPU takes, without the host.",
                _times(graphs),
            ]
        if padded:
            parts += [
                f"### {title}, padded",
                "Batches of eight heads whose sequences are from half to all of n long, masked "
                "beyond. `softmax` is longspan's with the same mask: it zeroes hidden keys and "
                "values, then calls the first of torch's kernels that takes a mask, so that it is "
                "not the fastest exact attention there is. Packed sequences, which skip what is "
                "hidden, are not compared. `yoso` is 32 hashes of 8 bits.",
                _times(padded),
            ]
        parts += [
            f"### Peak memory, {title.lower()}",
            "MB beyond the inputs, results included.",
            grid(chosen, lambda row: f"{row['peak_bytes'] / 2**20:,.0f}", _name),
        ]
    parts += hosts([row for row in rows if not _padded(row)], _name)
    return "\n\n".join(parts) + "\n"


def _runs(rows: list[Row]) -> list[str]:
    """Which command gave which rows, where it was not one alone."""
    names: dict[str, list[str]] = {}
    for row in rows:
        found = names.setdefault(row.get("command", "an older run"), [])
        if _name(row) not in found:
            found.append(_name(row))
    if len(names) == 1:
        return []
    each = [f"{', '.join(found)} by `{command}`" for command, found in names.items()]
    return [
        f"These are rows of {len(names)} runs: {'; '.join(each)}. Where exact attention is of "
        "another run than a method, a ratio is across runs."
    ]


def _times(rows: list[Row]) -> str:
    """Milliseconds, and how much faster than the faster exact kernel among the rows."""
    exact: dict[int, float] = {}
    for row in rows:
        if row["name"] in EXACT:
            exact[row["length"]] = min(row["seconds"], exact.get(row["length"], float("inf")))

    def time(row: Row) -> str:
        alone = not row["name"].startswith("convolution")  # which is no attention
        known = exact.get(row["length"]) if alone else None
        ratio = f" ({known / row['seconds']:.2f}×)" if known else ""
        return f"{milliseconds(row):.3f}{ratio}"

    return grid(rows, time, _name)


def _graph(row: Row) -> bool:
    return bool(row.get("graph"))


def _padded(row: Row) -> bool:
    return row.get("inputs") == "padded"


def _name(row: Row) -> str:
    return str(row["name"])


def draw(rows: Iterable[Row], path: str | os.PathLike[str]) -> None:
    """Time of 2^18 token-heads against length, both logarithmic: linear methods are level."""
    from matplotlib.figure import Figure

    rows = latest(rows)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, len(MODES), sharey=True)
    lengths = sorted({row["length"] for row in rows})
    for axes, (mode, title) in zip(panels, MODES.items(), strict=True):
        for name in PLOTTED:
            curve = sorted(
                (row["length"], milliseconds(row))
                for row in rows
                if (row["name"], row["mode"]) == (name, mode) and not _graph(row)
            )
            colour, marker = look_of(name)
            peer = name.endswith("Hugging Face")
            axes.plot(*zip(*curve, strict=True) if curve else ([], []), color=colour, marker=marker,
                      linestyle="--" if peer else "-", markersize=6, label=name,
                      markerfacecolor="white" if peer else colour)  # fmt: skip
        dress(axes, title, lengths)
    panels[0].set_ylabel("milliseconds for 2^18 token-heads")
    panels[0].legend(frameon=False)
    figure.suptitle(f"Attention on one {gpu_of(rows[-1])}: {rows[-1]['dtype']}, heads of 64")
    figure.savefig(path, dpi=140, metadata={"Software": None})


if __name__ == "__main__":
    write(sys.argv[1] if len(sys.argv) > 1 else "results/fused-gpu.jsonl", markdown, draw)
