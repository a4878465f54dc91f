"""The suites by name: one literal table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from longspan.attention import checks
from longspan.bench import cpu, error, length, linformer, model, spectrum
from longspan.bench.suite import Group, Setting


@dataclass(frozen=True)
class Suite:
    """A row of SUITES: what it measures, its groups, and whether it needs transformers."""

    summary: str
    groups: Callable[[Setting], Iterator[Group]]
    transformers: bool = False


SUITES: dict[str, Suite] = {
    "length": Suite("time and memory of every method over length", length.groups),
    "linformer": Suite("Linformer's grid of length and projected length", linformer.groups),
    "model": Suite(
        "a whole encoder's inference and training step", model.groups, transformers=True
    ),
    "error": Suite("error against cost, on random and real inputs", error.groups),
    "cpu": Suite("every implementation on this CPU", cpu.groups),
    "spectrum": Suite(
        "singular values of a model's attention, learned E", spectrum.groups, transformers=True
    ),
}


def default_device() -> str:
    """A GPU where torch sees one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def plan(names: Sequence[str], setting: Setting) -> list[tuple[str, Group]]:
    """The groups of the named suites; `ValueError` for what the user cannot have meant."""
    for name in names:
        checks.choice("suite", name, SUITES)
    for tokens in setting.lengths:
        checks.integer("length", tokens, 1)
    if setting.cuda and not torch.cuda.is_available():
        raise ValueError(f"device must be one that torch sees here, got {setting.device!r}")
    if find_spec("transformers") is None:
        for name in names:
            if SUITES[name].transformers or setting.model is not None:
                raise ValueError(
                    f"suite must run without transformers (pip install 'longspan[huggingface]' "
                    f"brings it), got {name!r}"
                )
    return [(name, group) for name in names for group in SUITES[name].groups(setting)]
