"""Rows for a CPU: every method beside exact attention, both passes, over length.

    python -m longspan.bench.cpu results/cpu.jsonl [tokens …] [names …]

One sequence, 8 heads of 64, float32. All that is timed at a length takes turns in one process; what
would take too long at the next length is left out there, except exact attention. Names, or how they
begin, leave out all others.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import longspan
from longspan import records
from longspan.attention.yoso import why_not_fused
from longspan.bench.cases import MODES, PROJECTED_LENGTH, Case
from longspan.bench.measure import Timing, measure, timing_row

LENGTHS = tuple(512 << i for i in range(8))
EXACT = "softmax"
BUDGET = 4.0  # seconds of repeats for one length and mode, three rounds at least
PATIENCE = 20.0  # seconds of a call that is made but once
LIMIT = 60.0  # seconds of a call that is not made at all

YOSO = {"num_hashes": 32, "hash_bits": 8}
YOSO_CASES: dict[str, dict[str, Any]] = {
    "yoso reference": {"impl": "reference"},
    "yoso fused": {"impl": "fused"},
    "yoso fused hadamard": {"impl": "fused", "hashing": "hadamard"},
    "yoso fused hadamard, 8 backward hashes": {
        "impl": "fused", "hashing": "hadamard", "backward_hashes": 8,
    },
}  # fmt: skip

Call = Callable[[], object]


def contenders(length: int, mode: str) -> Iterator[tuple[str, Case, Call]]:
    """What is timed at a length: exact attention first, then every method and implementation."""
    for name in (EXACT, *(m for m in longspan.METHODS if m not in (EXACT, "yoso"))):
        case = Case(name, length)
        yield name, case, case.build(mode)
        if name == "linformer":
            yield "linformer frozen", case, _frozen(case, mode)
    case = Case("yoso_expectation", length)
    yield "yoso_expectation eager", case, _eager(case, mode)
    for name, options in YOSO_CASES.items():
        if options["impl"] == "fused" and why_not_fused(torch.device("cpu")):
            continue
        case = Case("yoso", length, options=YOSO | options)
        yield name, case, case.build(mode)
        if name == "yoso fused":
            yield "yoso fused, one bucket", case, _one_bucket(case, mode)


def _inputs(case: Case, mode: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.heads, case.length, case.head_dim)
    training = mode == MODES[1]
    return [torch.randn(shape, generator=generator).requires_grad_(training) for _ in range(3)]


def _passes(function: Callable[..., Tensor], inputs: list[Tensor], mode: str) -> Call:
    def forward() -> Tensor:
        with torch.inference_mode():
            return function(*inputs)

    def forward_backward() -> object:
        y = function(*inputs)
        return torch.autograd.grad(y, inputs, torch.ones_like(y))

    return forward_backward if mode == MODES[1] else forward


def _frozen(case: Case, mode: str) -> Call:
    """Linformer whose projections need no gradient."""
    inputs = _inputs(case, mode)
    e, f = torch.randn(2, PROJECTED_LENGTH, case.length) / case.length**0.5
    return _passes(lambda q, k, v: longspan.linformer(q, k, v, e, f), inputs, mode)


def _one_bucket(case: Case, mode: str) -> Call:
    """YOSO where all keys are one vector, and all queries too: every pair collides, always."""
    inputs = _inputs(case, mode)
    for x in inputs[:2]:
        x.data[:] = x.data[:, :, :1]
    return _passes(lambda *x: longspan.yoso(*x, **case.options), inputs, mode)


def _eager(case: Case, mode: str) -> Call:
    """The expectation as Hugging Face's model computes it: N² weights, kept for the backward."""
    return _passes(_Eager.attend, _inputs(case, mode), mode)


class _Eager(torch.autograd.Function):
    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = _Eager.apply(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, 8)
        return F.normalize(y, dim=-1)

    @staticmethod
    def forward(ctx, q, k, v, bits):  # type: ignore[no-untyped-def]
        cosine = (q @ k.mT).clamp(-1, 1)
        weight = (1 - cosine.acos() / math.pi) ** bits
        ctx.save_for_backward(q, k, v, weight)
        ctx.bits = bits
        return weight @ v

    @staticmethod
    def backward(ctx, g):  # type: ignore[no-untyped-def]
        q, k, v, weight = ctx.saved_tensors
        w = ctx.bits / 2 * weight * (g @ v.mT)
        return w @ k, w.mT @ q, weight.mT @ g, None


# Its N × N tensors, several at a time, are gigabytes past this.
MOST_EAGER = 4096


def _too_long(name: str, length: int, before: dict[str, float], growth: float) -> bool:
    """Whether a contender is left out: `growth` times as many tokens may take that squared."""
    if name == "yoso_expectation eager" and length > MOST_EAGER:
        return True
    if name == EXACT or not before:
        return False
    return name not in before or growth**2 * before[name] > LIMIT


def main(path: str, lengths: tuple[int, ...] = LENGTHS, names: tuple[str, ...] = ("",)) -> None:
    """Measure, append rows to `path`, and print milliseconds and ratios to exact attention."""
    for mode in MODES:
        print(f"\n{mode}: milliseconds, and the time of {EXACT} divided by it", flush=True)
        before: dict[str, float] = {}
        for last, length in zip((lengths[0], *lengths), lengths, strict=False):
            found = {
                name: (case, call)
                for name, case, call in contenders(length, mode)
                if name.startswith(names) and not _too_long(name, length, before, length / last)
            }
            timings = measure(
                {name: _announced(name, length, call) for name, (_, call) in found.items()},
                budget=BUDGET,
                warmup=1 if length <= 4096 else 0,
                patience=PATIENCE,
            )
            before = {name: timing.seconds for name, timing in timings.items()}
            for name, timing in timings.items():
                ratio = timings[EXACT].seconds / timing.seconds if EXACT in timings else None
                row = timing_row(found[name][0], mode, timing)
                records.append(path, row | {"name": name, "suite": "cpu", "ratio": ratio})
            _show(length, timings)


def _announced(name: str, length: int, call: Call) -> Call:
    """The call, with its name on the terminal's last line while it runs."""
    if not sys.stderr.isatty():
        return call

    def run() -> object:
        sys.stderr.write(f"\r\x1b[K{length:,} {name} …")
        sys.stderr.flush()
        return call()

    return run


def _show(length: int, timings: dict[str, Timing]) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    exact = timings[EXACT].seconds if EXACT in timings else math.nan
    print(f"{length:,} tokens")
    for name, t in timings.items():
        spread = f"{1000 * t.low:.1f}–{1000 * t.high:.1f}, {t.repeats} times"
        ms = 1000 * t.seconds
        print(f"  {name:<40}{ms:>10.1f} ms {exact / t.seconds:>7.2f}×   ({spread})")
    sys.stdout.flush()


if __name__ == "__main__":
    words = sys.argv[2:]
    main(
        sys.argv[1],
        tuple(int(word) for word in words if word.isdigit()) or LENGTHS,
        tuple(word for word in words if not word.isdigit()) or ("",),
    )
