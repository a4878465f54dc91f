"""Measurements as append-only JSON lines, each stamped with the machine that made it.

One row is one JSON object on one line. Rows are only ever added, so a run that is interrupted
leaves everything it measured, and a table or plot can be redrawn without measuring again.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def append(path: str | os.PathLike[str], row: Mapping[str, Any]) -> Row:
    """Add one row, with `environment()` under the key "environment", and return what was written.

    The folder is made if it is missing. Raises `TypeError` for a value JSON cannot hold.
    """
    stamped = {**row, "environment": environment()}
    line = json.dumps(stamped, ensure_ascii=False, allow_nan=False) + "\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        # A row cut off by a crash must not swallow the next one.
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(line.encode())
    return stamped


def read(path: str | os.PathLike[str]) -> list[Row]:
    """All rows of a file, in the order they were written.

    A line that is not a JSON object, such as one cut off by a crash, is skipped with a warning
    that names its number.
    """
    rows = []
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if isinstance(row, dict):
                rows.append(row)
            else:
                warnings.warn(f"{path}, line {number}: not a JSON object, skipped", stacklevel=2)
    return rows


def command() -> str:
    """The command line of this process, or of the one that started it as a worker."""
    program, here = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parent
    words = ["longspan"]
    if program.is_relative_to(here) and program != here / "__main__.py":
        parts = program.relative_to(here.parent).with_suffix("").parts
        words = ["python", "-m", ".".join(part for part in parts if part != "__main__")]
    return shlex.join([*words, *sys.argv[1:]])


def environment() -> dict[str, Any]:
    """Versions, processor, cores, threads, GPU (or None) and the time in UTC."""
    import torch

    return {
        **_machine(),
        "threads": torch.get_num_threads(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@functools.cache
def _machine() -> dict[str, Any]:
    import torch

    return {
        "longspan": _version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": _cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _version() -> str:
    try:
        return metadata.version("longspan")
    except metadata.PackageNotFoundError:  # run from its source, not installed
        return "source"


def _cores() -> int:
    # In a container the process may use fewer cores than the machine has.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
