"""Keeps the rows of this run, in memory for the page and on disk for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longspan import records


class Recorder:
    """Appends each row to a file as soon as it is known, so an interrupted run loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[records.Row] = []

    def add(self, row: dict[str, Any]) -> None:
        """Store one row."""
        self.rows.append(records.append(self.path, row))
