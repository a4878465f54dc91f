"""`cpu`: every method and implementation beside exact attention on this CPU, over length."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import longspan
from longspan.attention.yoso import why_not_fused
from longspan.bench.cases import MODES, Case
from longspan.bench.length import HEAD_DIM, HEADS, entry
from longspan.bench.suite import EXACT, Group, Setting

YOSO = {"num_hashes": 32, "hash_bits": 8}
YOSO_CASES: dict[str, dict[str, Any]] = {
    "yoso reference": {"impl": "reference"},
    "yoso fused": {"impl": "fused"},
    "yoso fused hadamard": {"impl": "fused", "hashing": "hadamard"},
    "yoso fused hadamard, 8 backward hashes": {
        "impl": "fused", "hashing": "hadamard", "backward_hashes": 8,
    },
}  # fmt: skip


def contenders(length: int) -> Iterator[tuple[str, Case]]:
    """What is timed at a length: exact attention first, then every method and implementation."""
    for name in (EXACT, *(m for m in longspan.METHODS if m not in (EXACT, "yoso"))):
        yield name, Case(name, length, HEADS, HEAD_DIM)
    for name in ("linformer frozen", "yoso_expectation eager"):
        yield name, Case(name, length, HEADS, HEAD_DIM)
    for name, options in YOSO_CASES.items():
        if options["impl"] == "fused" and why_not_fused(torch.device("cpu")):
            continue
        yield name, Case("yoso", length, HEADS, HEAD_DIM, options=YOSO | options)
        if name == "yoso fused":
            case = Case(
                "yoso", length, HEADS, HEAD_DIM, options=YOSO | options, inputs="one-vector"
            )
            yield "yoso fused, one bucket", case


def groups(setting: Setting) -> Iterator[Group]:
    """Both modes from 512 tokens on, to 65,536, or to 4,096 if it must be quick."""
    if setting.cuda:
        raise ValueError(f"device must be cpu for the suite cpu, got {setting.device!r}")
    for length in setting.lengths or tuple(512 << i for i in range(4 if setting.quick else 8)):
        for mode in MODES:
            entries = [entry(name, case, mode, setting.seed) for name, case in contenders(length)]
            yield Group(f"{length:,} tokens, {mode}", entries, mode, length)
