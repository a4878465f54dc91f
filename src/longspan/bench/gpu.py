"""Rows for an NVIDIA GPU: YOSO beside exact attention, time and peak memory over length.

    python -m longspan.bench.gpu results/yoso-gpu.jsonl [--only TEXT] [--lengths N …] [--fresh]
    python -m longspan.report.gpu results/yoso-gpu.jsonl

Every length has the same work of 2^18 token-heads, at least eight heads. All that is compared at
one length, head dimension and mode is timed in turn, round after round; the main settings also as
CUDA graphs, which leave the host out. Rows already in the file are not measured again, so an
interrupted run goes on where it stopped; the second command makes tables and a plot of the rows.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspan import records
from longspan.attention.yoso.api import MAX_HASH_BITS
from longspan.bench.cases import MODES, Case
from longspan.bench.measure import graphed, measure, peak_bytes, timing_row

LENGTHS = tuple(512 << i for i in range(9))
FEW = (4096, 16384, 65536)  # lengths with inputs of one bucket, and fewer hashes backward
HEAD_DIMS = (64, 128)
REFERENCE = (512, 2048, 8192)  # plain torch takes long
SHORT = LENGTHS[:4]  # where all pairs may cost less than a sample
OTHERS = {"float16": (*SHORT, *FEW[1:]), "float32": (*SHORT, FEW[1])}  # number types, and lengths
HALF = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
EXACT = {
    "bfloat16": HALF,
    "float16": HALF,
    "float32": {"efficient": SDPBackend.EFFICIENT_ATTENTION},  # the only one that takes it
}
TOKEN_HEADS = 1 << 18
SECONDS = 1.0  # of rounds for one group

Context = Callable[[], AbstractContextManager[Any]]
Group = tuple[int, int, str, str]  # head dimension, length, mode, number type


@dataclass(frozen=True)
class Contender:
    """One implementation with its options on one kind of inputs, and what it must run within."""

    name: str
    case: Case
    context: Context = nullcontext
    graph: bool = False

    def key(self, mode: str) -> str:
        """What tells its row from all others, and what `--only` looks into."""
        case, more = self.case, ", graph" if self.graph else ""
        if case.dtype in OTHERS:
            more += f", {case.dtype}"
        return f"{self.name}, d={case.head_dim}, n={case.length}, {case.inputs}, {mode}{more}"

    def build(self, mode: str) -> Callable[[], object]:
        """The call to time."""
        call = self.case.build(mode)

        def run() -> object:
            with self.context():
                return call()

        return graphed(run) if self.graph else run


def groups() -> list[Group]:
    """What is in one group is interleaved."""
    found = list(product(HEAD_DIMS, LENGTHS, MODES, ["bfloat16"]))
    for dtype, lengths in OTHERS.items():
        found += product(HEAD_DIMS[:1], lengths, MODES, [dtype])
    return found


def contenders(
    head_dim: int, length: int, mode: str, dtype: str = "bfloat16"
) -> Iterator[Contender]:
    """What is timed in a group: exact attention by its fused kernels, and YOSO's settings."""
    shape: dict[str, Any] = dict(length=length, head_dim=head_dim, dtype=dtype, device="cuda")
    shape["heads"] = max(8, TOKEN_HEADS // length)
    for name, backend in EXACT[dtype].items():
        case = Case("softmax", **shape)
        yield Contender(f"softmax {name}", case, partial(sdpa_kernel, backend))

    def yoso(
        num_hashes: int,
        hash_bits: int = 8,
        inputs: str = "spread",
        impl: str = "fused",
        **more: int,
    ) -> Contender:
        options: dict[str, Any] = dict(num_hashes=num_hashes, hash_bits=hash_bits, **more)
        name = " ".join([f"yoso {impl}", *(f"{k}={v}" for k, v in options.items())])
        return Contender(
            name, Case("yoso", options={**options, "impl": impl}, inputs=inputs, **shape)
        )

    yield yoso(16)
    yield yoso(32)
    if head_dim == 64 and length in SHORT:
        options = dict(hash_bits=8, impl="fused")
        yield Contender("yoso_expectation", Case("yoso_expectation", options=options, **shape))
    if dtype in OTHERS:
        return
    if head_dim == 64:
        yield replace(yoso(16), graph=True)
        yield replace(yoso(32), graph=True)
    if head_dim == 64 and length in REFERENCE:
        yield yoso(32, impl="reference")
    for num_hashes in (16, 32):
        yield yoso(num_hashes, min(length.bit_length() - 1, MAX_HASH_BITS))
        yield yoso(num_hashes, inputs="clustered")
    if head_dim == 64 and length in FEW:
        if mode == "forward+backward":
            yield yoso(32, backward_hashes=8)
        yield yoso(32, inputs="one-key")
        yield yoso(32, inputs="one-vector")


def run(
    path: str | os.PathLike[str],
    *,
    only: str = "",
    lengths: Sequence[int] = LENGTHS,
    fresh: bool = False,
) -> None:
    """Measure what `path` does not hold yet, or with `fresh` all, and append it there.

    `only` keeps what has this text in its key. Exact attention runs with every group, for a ratio
    is of one run.
    """
    gpu = records.environment()["gpu"]
    known = records.read(path) if Path(path).exists() and not fresh else []
    done = {row.get("key") for row in known if row["environment"]["gpu"] == gpu}
    todo: dict[Group, set[str]] = {}
    for group in groups():
        keys = {contender.key(group[2]) for contender in contenders(*group)}
        missing = {key for key in keys - done if only.lower() in key.lower()}
        if missing and group[1] in lengths:
            todo[group] = missing
    print(f"{sum(map(len, todo.values()))} rows to measure in {len(todo)} groups")
    print(
        "ms per 2^18 token-heads; × faster than the faster exact kernel; peak memory above inputs"
    )
    print("and outputs in units of v", flush=True)
    begin, spent = time.perf_counter(), 0.0
    total = sum(map(_cost, todo))
    for number, (group, missing) in enumerate(todo.items(), start=1):
        gone = time.perf_counter() - begin
        left = gone * (total / spent - 1) if spent else total
        head_dim, length, mode, dtype = group
        print(f"\n[{number}/{len(todo)}] {mode}, n = {length:,}, d = {head_dim}, {dtype}", end="")
        print(f"   ({gone:.0f} s gone, about {left:.0f} s left)", flush=True)
        for row in measured(contenders(*group), mode, missing):
            print(_line(records.append(path, row)), flush=True)
        spent += _cost(group)


def measured(found: Iterable[Contender], mode: str, wanted: set[str]) -> Iterator[dict[str, Any]]:
    """The rows of those whose keys are wanted, timed in turn with exact attention."""
    chosen = {c.key(mode): c for c in found if _exact(c) or c.key(mode) in wanted}
    calls = {key: contender.build(mode) for key, contender in chosen.items()}
    # The reference would leave no time for more than a few rounds of the others.
    slow = {key: calls.pop(key) for key in list(calls) if "reference" in key}
    for call in calls.values():
        call()  # compiles
    plain = {key: call for key, call in (calls | slow).items() if not chosen[key].graph}
    peaks = {key: peak_bytes(call) for key, call in plain.items()}
    device = next(iter(chosen.values())).case.device
    timings = measure(calls, budget=SECONDS, device=device)
    timings |= measure(slow, budget=0, warmup=0, min_repeats=2, device=device)
    exact = min(timings[key].seconds for key, contender in chosen.items() if _exact(contender))
    for key, contender in chosen.items():
        if key not in wanted:
            continue
        case = contender.case
        tokens = case.batch * case.heads * case.length
        v_bytes = tokens * case.head_dim * getattr(torch, case.dtype).itemsize
        yield timing_row(case, mode, timings[key]) | {
            "suite": "yoso-gpu",
            "name": contender.name,
            "graph": contender.graph,
            "key": key,
            "exact_seconds": exact,
            "peak_bytes": peaks.get(key),
            "outputs_bytes": v_bytes * (1 if mode == "forward" else 4),  # y; dq, dk, dv
            "v_bytes": v_bytes,
            "command": records.command(),
        }


def _exact(contender: Contender) -> bool:
    return contender.case.method == "softmax"


def _cost(group: Group) -> float:
    """Rough seconds of a group on an H200: its rounds, and six calls of both exact kernels."""
    head_dim, length, mode, dtype = group
    tokens = max(8 * length, TOKEN_HEADS)
    passes, rate = 1 if mode == "forward" else 4.5, 4e13 if dtype == "float32" else 4e14
    return SECONDS + 12 * passes * 4 * tokens * length * head_dim / rate


def _line(row: dict[str, Any]) -> str:
    share = TOKEN_HEADS / (row["batch"] * row["heads"] * row["length"])
    milliseconds = f"{1000 * share * row['seconds']:9.3f}"
    ratio = f"{row['exact_seconds'] / row['seconds']:7.2f}×"
    above = (row["peak_bytes"] or 0) - row["outputs_bytes"]
    memory = 9 * " " if row["graph"] else f"{above / row['v_bytes']:7.2f} v"
    graph = ", as a graph" if row["graph"] else ""
    return f"{milliseconds} {ratio} {memory}   {row['name']}, {row['inputs']}{graph}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="longspan.bench.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("path", nargs="?", default="results/yoso-gpu.jsonl", help="of the rows")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this in their key")
    parser.add_argument("--lengths", nargs="+", type=int, choices=LENGTHS, default=LENGTHS)
    parser.add_argument("--fresh", action="store_true", help="measure again what is in the file")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("bench.gpu needs an NVIDIA GPU, and torch sees none")
    run(given.path, only=given.only, lengths=given.lengths, fresh=given.fresh)


if __name__ == "__main__":
    main()
