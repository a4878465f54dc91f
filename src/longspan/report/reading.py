"""Rows of files, checked: what cannot be drawn is named, with the reason, and left out."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from longspan import records

_NUMBER = (int, float)
# What a row of a kind must have to be drawn.
_NEEDED: dict[str, dict[str, Any]] = {
    "timing": {"mode": str, "method": str, "length": int, "seconds": _NUMBER},
    "stopped": {"mode": str, "method": str, "length": int},
    "error": {
        "inputs": str,
        "method": str,
        "name": str,
        "length": int,
        "seconds": _NUMBER,
        "options": dict,
        "error_limit": _NUMBER,
        "error_softmax": _NUMBER,
    },
    "spectrum": {
        "weights": str,
        "layer": int,
        "places": list,
        "cumulative": list,
        "at_quarter": list,
        "length": int,
    },
    "projection": {"layer": int, "untrained": dict, "trained": dict, "picture": list},
    "training": {"method": str},
    "evaluation": {"method": str},
    "run": {},
    "end": {},
}
# Suites with a report of their own: their rows have another work at every length.
ELSEWHERE = {
    "yoso-gpu": "python -m longspan.report.gpu draws them",
    "fused-gpu": "python -m longspan.report.fused draws them",
}


def read(
    paths: Iterable[str | os.PathLike[str]],
) -> tuple[list[dict[str, Any]], list[str]]:
    """All rows that can be drawn, and a sentence for everything that cannot."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for path in paths:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = records.read(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
            continue
        name = Path(path).name
        problems += [str(w.message).replace(str(path), name) for w in caught]
        if not found:
            problems.append(f"{name}: no rows")
        reasons = Counter[str]()
        for row in found:
            reason = why_not(row)
            if reason:
                reasons[reason] += 1
            else:
                rows.append(row)
        problems += [
            f"{name}: {count} row{'s' * (count > 1)} left out: {why}"
            for why, count in reasons.items()
        ]
    return rows, problems


def why_not(row: Mapping[str, Any]) -> str:
    """Why a row cannot be drawn; empty where it can."""
    kind, suite = row.get("kind"), row.get("suite")
    if suite in ELSEWHERE:
        return f"suite {suite}: {ELSEWHERE[suite]}"
    if kind not in _NEEDED:
        return f"kind must be one of {', '.join(_NEEDED)}, got {kind!r}"
    for name, wanted in _NEEDED[kind].items():
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, wanted):
            word = "a number" if wanted is _NUMBER else f"of type {wanted.__name__}"
            return f"{name} must be {word} in a row of kind {kind}, got {value!r}"
        if name in ("seconds", "length") and not value > 0:
            return f"{name} must be positive in a row of kind {kind}, got {value!r}"
    if suite == "model" and not (
        isinstance(row.get("layers"), int) and isinstance(row.get("width"), int)
    ):
        return "layers and width must be integers in a row of the suite model"
    return ""
