"""`length`: time and memory of every method over length, the table of the Nyströmformer paper.

One row is one call, forward or with its backward pass, on sequences of 8 heads of 64. A GPU gets
2^18 token-heads a call, so that short sequences fill it, and its rows are of so large a batch;
exact attention runs there through cuDNN, the fastest kernel torch has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from longspan.bench.cases import MODES, Case, fastest_exact
from longspan.bench.suite import EXACT, Call, Entry, Group, Setting

HEADS, HEAD_DIM = 8, 64
TOKEN_HEADS = 1 << 18
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "eager": ("eager", {}),
    "linformer-256": ("linformer", {"projected_length": 256}),
    "window-257": ("window", {"window": 128}),
    "nystrom-64": ("nystrom", {"num_landmarks": 64}),
    "nystrom-32": ("nystrom", {"num_landmarks": 32}),
    "yoso-32": ("yoso", {"num_hashes": 32, "hash_bits": 8}),
    "yoso-16": ("yoso", {"num_hashes": 16, "hash_bits": 8}),
    "yoso_expectation": ("yoso_expectation", {"hash_bits": 8}),
    "reformer": ("reformer", {"num_hashes": 2}),
    "strided": ("strided", {}),
}


def lengths(setting: Setting) -> tuple[int, ...]:
    """512, 1,024, … up to 65,536, or 131,072 on a GPU; a few fewer if it must be quick."""
    return setting.lengths or tuple(512 << i for i in range((6, 8, 7, 9)[_speed(setting)]))


def groups(setting: Setting) -> Iterator[Group]:
    """Both modes at every length."""
    for length in lengths(setting):
        for mode in MODES:
            yield group(length, mode, setting)


def group(
    length: int,
    mode: str,
    setting: Setting,
    *,
    names: dict[str, tuple[str, dict[str, Any]]] = NAMES,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    dtype: str | None = None,
) -> Group:
    """Attention alone, by every name, on the same inputs."""
    shape: dict[str, Any] = dict(
        length=length,
        heads=heads,
        head_dim=head_dim,
        batch=max(1, TOKEN_HEADS // (heads * length)) if setting.cuda else 1,
        dtype=dtype or setting.dtype,
        device=setting.device,
    )
    series = f"{mode}, {heads} heads of {head_dim}, {shape['dtype']}"
    entries = [
        entry(name, Case(method, options=options, **shape), mode, setting.seed)
        for name, (method, options) in names.items()
    ]
    title = f"{length:,} tokens, batch {shape['batch']}, {series}"
    return Group(title, entries, series, length, shape["batch"])


def entry(name: str, case: Case, mode: str, seed: int) -> Entry:
    """One case in one mode; eager ones say how much memory their N × N weights will take."""
    needs = 0
    if "eager" in case.method:
        size = getattr(torch, case.dtype).itemsize
        needs = 4 * case.batch * case.heads * case.length**2 * size

    def build() -> Call:
        call = case.build(mode, seed)
        return fastest_exact(call) if case.method == EXACT and case.device != "cpu" else call

    return Entry(name, {"mode": mode, **asdict(case)}, build, needs=needs)


def _speed(setting: Setting) -> int:
    return 2 * setting.cuda + (not setting.quick)
