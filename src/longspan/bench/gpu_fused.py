"""Rows for an NVIDIA GPU: the Triton methods beside exact attention, their references and a peer.

    python -m longspan.bench.gpu_fused results/fused-gpu.jsonl [METHOD …] [--fresh]
    python -m longspan.bench.gpu_fused --kernels nystrom 4096              # time kernel by kernel

Lengths that the file holds already are not measured again, so an interrupted run goes on.

Every length has the same work of 2^18 token-heads, at least eight heads of 64, in bfloat16. The
peer is the attention of Hugging Face's Nyströmformer without its linear layers, under autocast.
What is fused, and exact attention, is also timed as a CUDA graph, which leaves the host out.
Batches that are padded, of YOSO too, are timed beside `softmax` with the same mask.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from longspan import records
from longspan.attention import checks
from longspan.attention.convolution import add_convolution
from longspan.bench.cases import MODES, Case, fastest_exact
from longspan.bench.gpu import Context
from longspan.bench.measure import graphed, measure, peak_bytes, timing_row

SUITE = "fused-gpu"
LENGTHS = tuple(512 << i for i in range(9))
TOKEN_HEADS = 1 << 18
SECONDS = 0.3  # of repeats for one length and mode
LANDMARKS = 64
TAPS = 33  # of the convolution
EXACT = {
    "softmax cuDNN": SDPBackend.CUDNN_ATTENTION,
    "softmax flash": SDPBackend.FLASH_ATTENTION,
}
METHODS: dict[str, dict[str, Any]] = {
    "yoso_expectation": {"hash_bits": 8},
    "nystrom": {"num_landmarks": LANDMARKS},
    "linformer": {"projected_length": 256},
    "window": {"window": 128},
}
# A reference that looks at all pairs, and a peer that keeps N × m matrices, stop at these lengths.
LONGEST = {
    "yoso_expectation reference": 4096,
    "yoso_expectation fused": 32768,
    "nystrom Hugging Face": 32768,
}

GRAPH = ", graph"  # behind the name of what is timed as a CUDA graph
PADDED = ", padded"  # and of what is given a mask
PADDED_HEADS = 8
YOSO = {"num_hashes": 32, "hash_bits": 8}
Call = Callable[[], object]


def contenders(length: int, methods: list[str]) -> Iterator[tuple[str, Case, Context]]:
    """What is timed at a length: exact attention by two kernels, methods fused and as written."""
    heads = max(8, TOKEN_HEADS // length)
    shape: dict[str, Any] = dict(length=length, heads=heads, dtype="bfloat16", device="cuda")
    for name, backend in EXACT.items():
        yield name, Case("softmax", **shape), partial(sdpa_kernel, backend)
    for method in methods:
        for impl in ("fused", "reference"):
            name = f"{method} {impl}"
            if length <= LONGEST.get(name, length):
                options = {**METHODS[method], "impl": impl}
                yield name, Case(method, options=options, **shape), nullcontext


def padded(length: int, methods: list[str]) -> Iterator[tuple[str, Case]]:
    """What is timed with a mask: `softmax` by the first kernel that takes one, methods."""
    batch = max(1, TOKEN_HEADS // length // PADDED_HEADS)
    shape: dict[str, Any] = dict(
        length=length, heads=PADDED_HEADS, batch=batch, dtype="bfloat16", device="cuda",
        inputs="padded",
    )  # fmt: skip
    yield f"softmax{PADDED}", Case("softmax", **shape)
    for method, options in {"yoso": YOSO, **METHODS}.items():
        known = method in methods or method == "yoso"
        if known and length <= LONGEST.get(f"{method} fused", length):
            case = Case(method, options={**options, "impl": "fused"}, **shape)
            yield f"{method} fused{PADDED}", case


class _Given(nn.Module):
    """Stands for a linear layer whose result is given."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result = result

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.result


def hugging_face(q: Tensor, k: Tensor, v: Tensor, heads: int) -> nn.Module:
    """Hugging Face's Nyströmformer attention, whose linear layers give q, k and v (B, N, H·D).

    Raises ImportError where transformers is missing.
    """
    from transformers import NystromformerConfig
    from transformers.models.nystromformer.modeling_nystromformer import (
        NystromformerSelfAttention,
    )

    config = NystromformerConfig(
        hidden_size=q.shape[2],
        num_attention_heads=heads,
        num_landmarks=LANDMARKS,
        segment_means_seq_len=q.shape[1],
        attention_probs_dropout_prob=0.0,
    )
    layer = NystromformerSelfAttention(config).to(q.device)
    layer.conv_kernel_size = None  # ours is timed without the convolution, too
    layer.query, layer.key, layer.value = _Given(q), _Given(k), _Given(v)
    return layer


def peer(length: int, mode: str) -> tuple[Case, Call]:
    """One call of Hugging Face's attention on the same work."""
    heads, training = 8, mode == "forward+backward"
    case = Case(
        "nystrom", length, heads=heads, batch=max(1, TOKEN_HEADS // length // heads),
        dtype="bfloat16", device="cuda", options={"num_landmarks": LANDMARKS},
    )  # fmt: skip
    shape = (case.batch, length, heads * case.head_dim)
    q, k, v = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda").requires_grad_(training)
        for _ in range(3)
    )
    layer = hugging_face(q, k, v, heads)

    def run() -> object:
        with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(training):
            (y,) = layer(q)
        return torch.autograd.grad(y, (q, k, v), torch.ones_like(y)) if training else y

    return case, run


def convolutions(length: int, mode: str) -> Iterator[tuple[str, Case, Call]]:
    """Nyströmformer's residual convolution alone, added to a given output."""
    case = Case(
        "nystrom", length, heads=max(8, TOKEN_HEADS // length), dtype="bfloat16", device="cuda",
        options={"conv_kernel": TAPS},
    )  # fmt: skip
    training = mode == "forward+backward"
    shape = (1, case.heads, length, case.head_dim)
    y, v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight = torch.randn(case.heads, 1, TAPS, 1, dtype=torch.bfloat16, device="cuda")
    leaves = [x.requires_grad_(training) for x in (y, v, weight)]
    g = torch.ones_like(y)

    def run(impl: str) -> object:
        out = add_convolution(y, v, weight, None, impl)
        return torch.autograd.grad(out, leaves, g) if training else out

    for impl in ("fused", "reference"):
        yield f"convolution {impl}", case, partial(run, impl)


def within(context: Context, call: Call) -> Call:
    """The call inside a context."""

    def run() -> object:
        with context():
            return call()

    return run


def calls(length: int, mode: str, methods: list[str]) -> dict[str, tuple[Case, Call]]:
    """Everything that can run at a length, by name."""
    found = {
        name: (case, within(context, case.build(mode)))
        for name, case, context in contenders(length, methods)
    }
    for name, case in padded(length, methods):
        call = case.build(mode)
        found[name] = case, fastest_exact(call) if case.method == "softmax" else call
    if "nystrom" in methods:
        found |= {name: (case, call) for name, case, call in convolutions(length, mode)}
    name = "nystrom Hugging Face"
    if "nystrom" in methods and length <= LONGEST[name]:
        try:
            found[name] = peer(length, mode)
        except ImportError as error:
            print(f"{name} was not timed: {error}", file=sys.stderr)
    alone = [name for name in found if name in EXACT or name.endswith("fused")]
    return found | {name + GRAPH: (found[name][0], graphed(found[name][1])) for name in alone}


def left(path: str, methods: list[str]) -> list[tuple[str, int]]:
    """The modes and lengths that `path` lacks rows of, on this GPU."""
    gpu = records.environment()["gpu"]
    known = records.read(path) if Path(path).exists() else []
    done = {
        (row["mode"], row["length"], row["name"])
        for row in known
        if row.get("suite") == SUITE and row["environment"]["gpu"] == gpu
    }
    return [
        (mode, length)
        for mode in MODES
        for length in LENGTHS
        if any((mode, length, name) not in done for name in names(length, methods))
    ]


def names(length: int, methods: list[str]) -> list[str]:
    """What has rows at a length wherever it is measured; the peer needs transformers."""
    full = [name for name, _, _ in contenders(length, methods)]
    return full + [name for name, _ in padded(length, methods)]


def run(path: str, methods: list[str], *, fresh: bool = False) -> None:
    """Measure what `path` lacks, or with `fresh` all, append it there, and print milliseconds."""
    every = [(mode, length) for mode in MODES for length in LENGTHS]
    print("ms per 2^18 token-heads, and the ratio to the faster exact kernel")
    for mode, length in every if fresh else left(path, methods):
        found = calls(length, mode, methods)
        timings = measure(
            {name: call for name, (_, call) in found.items()},
            budget=SECONDS,
            warmup=2,
            max_repeats=15,
            device="cuda",
        )
        masked = timings[f"softmax{PADDED}"].seconds
        full = min(timings[name].seconds for name in EXACT)
        share = TOKEN_HEADS / (max(8, TOKEN_HEADS // length) * length)
        rows, cells = [], []
        for name, (case, call) in found.items():
            graph = name.endswith(GRAPH)
            rows.append(
                timing_row(case, mode, timings[name])
                | {"name": name.removesuffix(GRAPH), "graph": graph, "suite": SUITE}
                | {"peak_bytes": None if graph else peak_bytes(call), "command": records.command()}
            )
            seconds = timings[name].seconds
            exact = masked if name.endswith(PADDED) else full
            cells.append(f"{name} {1000 * share * seconds:.3f} ({exact / seconds:.2f}×)")
        for row in rows:  # a length has all of them or none
            records.append(path, row)
        print(f"{mode}, {length:,}  " + "   ".join(cells), flush=True)


def by_kernel(method: str, length: int, rounds: int = 10) -> None:
    """Print the microseconds that each kernel of a fused call takes, forward and with backward."""
    from torch.profiler import ProfilerActivity, profile

    for mode in MODES:
        call = calls(length, mode, [method])[f"{method} fused"][1]
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            for _ in range(rounds):
                call()
            torch.cuda.synchronize()
        events = [e for e in profiler.key_averages() if e.self_device_time_total > 0]
        kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        total = sum(e.self_device_time_total for e in kernels) / rounds
        print(f"\n{method} {mode}, {length:,} tokens: {total:.1f} µs on the GPU")
        for event in sorted(kernels, key=lambda e: -e.self_device_time_total):
            each = event.self_device_time_total / rounds
            print(f"  {each:8.1f} µs  {event.count // rounds:3d} ×  {event.key[:90]}")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="longspan.bench.gpu_fused", description=__doc__.split("\n")[0]
    )
    parser.add_argument("path", nargs="?", default="results/fused-gpu.jsonl", help="of the rows")
    parser.add_argument("methods", nargs="*", help=f"some of {', '.join(METHODS)}; all if none")
    parser.add_argument("--fresh", action="store_true", help="measure again what is in the file")
    parser.add_argument("--kernels", nargs=2, metavar=("METHOD", "N"), help="kernel by kernel")
    given = parser.parse_args(arguments)
    try:
        for method in given.methods:
            checks.choice("method", method, METHODS)
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        sys.exit("bench.gpu_fused needs an NVIDIA GPU, and torch sees none")
    if given.kernels:
        by_kernel(given.kernels[0], int(given.kernels[1]))
    else:
        run(given.path, given.methods or list(METHODS), fresh=given.fresh)


if __name__ == "__main__":
    main()
