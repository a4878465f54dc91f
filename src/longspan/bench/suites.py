"""The suites by name: one literal table, and the one way to run them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from longspan.attention import checks
from longspan.bench import length, linformer, model
from longspan.bench.suite import Group, Setting, run


@dataclass(frozen=True)
class Suite:
    """A row of SUITES: what it measures, and its groups for a setting."""

    summary: str
    groups: Callable[[Setting], Iterator[Group]]


SUITES: dict[str, Suite] = {
    "length": Suite("time and memory of every method over length", length.groups),
    "linformer": Suite("Linformer's grid of length and projected length", linformer.groups),
    "model": Suite("a whole encoder's inference and training step", model.groups),
}


def default_device() -> str:
    """A GPU where torch sees one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check(names: Sequence[str], setting: Setting) -> None:
    """Raise `ValueError` for what the user cannot have meant."""
    for name in names:
        checks.choice("suite", name, SUITES)
    for tokens in setting.lengths:
        checks.integer("length", tokens, 1)
    if setting.cuda and not torch.cuda.is_available():
        raise ValueError(f"device must be one that torch sees here, got {setting.device!r}")


def run_suites(
    names: Sequence[str],
    path: str | os.PathLike[str],
    setting: Setting,
    *,
    fresh: bool = False,
    command: str = "",
    say: Callable[[str], object] = print,
) -> int:
    """Measure the named suites into `path`, see `longspan.bench.suite.run`."""
    check(names, setting)
    groups = [(name, group) for name in names for group in SUITES[name].groups(setting)]
    return run(groups, path, setting, fresh=fresh, command=command, say=say)
