"""From which length a method is faster than exact attention, read off measured times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Crossover:
    """Where one method starts to beat exact attention, and stays ahead up to the last length.

    `length` is None where it is still slower at `last`, and equals `first` where it is faster
    from the shortest measured length on; `seconds` is what the method takes at `length`.
    `extrapolated` says that exact attention was not measured there: its time was continued with
    the square of the length.
    """

    length: float | None
    seconds: float | None
    extrapolated: bool
    first: int
    last: int

    def __str__(self) -> str:
        if self.length is None:
            return f"not up to {self.last:,}"
        if self.length <= self.first:
            return f"{self.first:,} or shorter"
        note = " (exact attention extrapolated)" if self.extrapolated else ""
        return f"about {_round(self.length):,}{note}"


def crossover(exact: Mapping[int, float], other: Mapping[int, float]) -> Crossover | None:
    """Compare seconds by length; between measured lengths both are straight lines in log-log.

    Returns None where the two have no length in common.
    """
    lengths = sorted(n for n in other if n in exact or (exact and n > max(exact)))
    if not lengths:
        return None
    first, last = lengths[0], lengths[-1]
    lead = {n: math.log(other[n] / exact_seconds(exact, n)) for n in lengths}  # < 0: it wins
    slower = [n for n in lengths if lead[n] >= 0]
    if not slower:
        return Crossover(first, other[first], False, first, last)
    if slower[-1] == last:
        return Crossover(None, None, False, first, last)
    below = slower[-1]
    above = lengths[lengths.index(below) + 1]
    share = lead[below] / (lead[below] - lead[above])
    length = below * (above / below) ** share
    seconds = other[below] * (other[above] / other[below]) ** share
    return Crossover(length, seconds, length > max(exact), first, last)


def crossovers(rows: Iterable[Mapping[str, Any]], device: str) -> dict[str, dict[str, int | None]]:
    """By mode and method, from how many tokens on it is faster than exact attention; None: never.

    Of the rows of the suite `length` on a kind of device, those of the methods' default settings;
    two digits, and the shortest measured length where it is faster from there on.
    """
    chosen = [row for row in rows if row.get("suite") == "length" and _device(row) == device]
    found: dict[str, dict[str, int | None]] = {}
    for mode in ("forward", "forward+backward"):
        seconds = times(chosen, mode)
        exact = seconds.get("softmax", {})
        found[mode] = {}
        for name, measured in seconds.items():
            method = DEFAULTS.get(name)
            point = crossover(exact, measured) if method else None
            if method and point:
                found[mode][method] = None if point.length is None else _round(point.length)
    return found


# Of the names in the suite `length`, those that have a method's default options.
DEFAULTS = {
    "linformer-256": "linformer",
    "window-257": "window",
    "nystrom-64": "nystrom",
    "yoso-32": "yoso",
    "yoso_expectation": "yoso_expectation",
    "reformer": "reformer",
    "strided": "strided",
}


def _device(row: Mapping[str, Any]) -> str:
    return str(row.get("device", "cpu")).partition(":")[0]


def exact_seconds(exact: Mapping[int, float], length: int) -> float:
    """Time of exact attention: measured, or continued quadratically beyond its last length."""
    if length in exact:
        return exact[length]
    longest = max(exact)
    return exact[longest] * (length / longest) ** 2


def times(rows: Iterable[Mapping[str, Any]], mode: str) -> dict[str, dict[int, float]]:
    """Median seconds of a sequence by name and length, from the timing rows of one mode.

    Where rows have no name, it is that of the method; the last row of a name and length counts.
    """
    return table(rows, mode, "seconds")


def table(rows: Iterable[Mapping[str, Any]], mode: str, field: str) -> dict[str, dict[int, float]]:
    """A number of the timing rows of one mode, for one sequence of the batch, as in `times`."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.get("kind") == "timing" and row["mode"] == mode and row.get(field) is not None:
            value = row[field] / row.get("batch", 1)
            found.setdefault(label(row), {})[row["length"]] = value
    return found


def label(row: Mapping[str, Any]) -> str:
    """What a row is called in charts and tables."""
    return str(row.get("name", row["method"]))


def _round(length: float) -> int:
    """Two significant digits: the measurement does not carry more. Powers of two stay."""
    if length == int(length) and int(length) & (int(length) - 1) == 0:
        return int(length)
    unit = 10 ** max(0, math.floor(math.log10(length)) - 1)
    return round(length / unit) * unit
