"""Rows for an NVIDIA GPU: YOSO beside exact attention, time and peak memory over length.

    python -m longspan.bench.gpu results/yoso-gpu.jsonl

Every length has the same work of 2^18 token-heads, at least eight heads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspan import records
from longspan.bench.cases import MODES, Case
from longspan.bench.measure import measure, timing_row

LENGTHS = tuple(512 << i for i in range(9))
TOKEN_HEADS = 1 << 18
SECONDS = 0.4  # of repeats for one length and mode


Context = Callable[[], AbstractContextManager[Any]]


def contenders(length: int) -> Iterator[tuple[str, Case, Context]]:
    """What is timed at a length: exact attention by its two fused kernels, and YOSO."""
    heads = max(8, TOKEN_HEADS // length)
    shape: dict[str, Any] = dict(length=length, heads=heads, dtype="bfloat16", device="cuda")
    yield (
        "softmax cuDNN",
        Case("softmax", **shape),
        partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION),
    )
    yield (
        "softmax flash",
        Case("softmax", **shape),
        partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION),
    )
    for num_hashes in (16, 32):
        options = {"num_hashes": num_hashes, "hash_bits": 8, "impl": "fused"}
        yield f"yoso-{num_hashes} fused", Case("yoso", options=options, **shape), nullcontext


def within(context: Context, call: Callable[[], object]) -> Callable[[], object]:
    """The call inside a context."""

    def run() -> object:
        with context():
            return call()

    return run


def peak_bytes(call: Callable[[], object]) -> int:
    """Bytes that a call needs beyond what was there before, its results included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def main(path: str) -> None:
    """Measure, append rows to `path`, and print milliseconds per 2^18 token-heads."""
    for mode in MODES:
        print(f"\n{mode}: ms per 2^18 token-heads, and the ratio to the faster exact kernel")
        for length in LENGTHS:
            found = list(contenders(length))
            calls = {name: within(context, case.build(mode)) for name, case, context in found}
            timings = measure(calls, budget=SECONDS, warmup=3, device="cuda")
            share = TOKEN_HEADS / (found[0][1].heads * length)
            exact = min(t.seconds for name, t in timings.items() if name.startswith("softmax"))
            cells = []
            for name, case, _ in found:
                timing = timings[name]
                row = timing_row(case, mode, timing)
                row |= {"name": name, "peak_bytes": peak_bytes(calls[name]), "suite": "yoso-gpu"}
                records.append(path, row)
                ratio = exact / timing.seconds
                cells.append(f"{name} {1000 * share * timing.seconds:7.3f} ({ratio:5.2f}×)")
            print(f"{length:7,}  " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("bench.gpu needs an NVIDIA GPU, and torch sees none")
    main(sys.argv[1] if len(sys.argv) > 1 else "results/yoso-gpu.jsonl")
