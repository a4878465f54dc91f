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
    """Two significant digits: the measurement does not carry more."""
    unit = 10 ** max(0, math.floor(math.log10(length)) - 1)
    return round(length / unit) * unit
