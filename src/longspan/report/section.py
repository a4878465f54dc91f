"""What a page is made of: sections with a text, charts and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A plotly figure; `id` names it in the page and as a file."""

    id: str
    figure: dict[str, Any]
    caption: str = ""


@dataclass(frozen=True)
class Table:
    """Cells of text; the first of a line is its heading."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A card of the page."""

    title: str
    text: str = ""
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = field(default=())


def machine(row: Mapping[str, Any]) -> str:
    """The device a row was measured on, in words."""
    stamp = row.get("environment", {})
    if stamp.get("gpu") and row.get("device", "cuda") != "cpu":
        return str(stamp["gpu"])
    return f"{stamp.get('cpu', 'an unnamed CPU')}, {stamp.get('cores', '?')} cores"


def busy(rows: Rows) -> str:
    """A warning where rows were made on a busy machine."""
    busy = [
        row["load"] / row["environment"]["cores"]
        for row in rows
        if row.get("load")
        and row.get("device") == "cpu"
        and row.get("environment", {}).get("cores")
    ]
    if not busy or max(busy) <= 1.5:
        return ""
    return (
        f" The machine was busy with other work: its load average was up to {max(busy):.1f} times "
        "its cores, so times are too long, and their ratios uncertain."
    )


def slug(text: str) -> str:
    """Letters and digits of a text, for ids and names of files."""
    words = "".join(c if c.isalnum() and c.isascii() else " " for c in text.lower()).split()
    return "-".join(words)


def milliseconds(seconds: float) -> str:
    """Three significant digits, as "4.21", "42.1", "421" or "4,210"."""
    return number(1000 * seconds)


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def times_as(ratio: float) -> str:
    """A ratio, as "0.83×", "4.2×" or "42×"."""
    digits = 0 if ratio >= 10 else 1 if ratio >= 2 else 2
    return f"{ratio:,.{digits}f}×"
