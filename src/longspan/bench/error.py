"""`error`: how far methods are from what they approximate, and what they cost: the frontier.

`error_limit` is ‖y − y*‖ / ‖y*‖ with y* the method's own limit: `yoso_expectation` for `yoso`
(many hashes), exact attention for the others (as many landmarks, projected keys, … as tokens).
`error_softmax` compares every method with exact attention after scaling all rows of both to length
one, which is what YOSO does to its output: the limit of YOSO is another kernel.

Inputs: Gaussian ("spread"), around 32 centres ("clustered"), and, where a model is named, the
queries, keys and values of all its layers on a text ("real"). Linformer is shown untrained, with
means of segments and with Gaussian matrices: what it learns is in the suite `spectrum`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import longspan
from longspan.attention.base import unit
from longspan.bench import real
from longspan.bench.cases import draw_inputs, fastest_exact
from longspan.bench.suite import EXACT, Call, Entry, Group, Setting

HEADS, HEAD_DIM = 8, 64


Contender = tuple[str, str, dict[str, Any]]  # family (a line of the chart), method, options


def contenders(tokens: int) -> Iterator[Contender]:
    """The options that make a method dearer and nearer, one after the other."""
    yield "softmax", "softmax", {}
    for num_hashes in (8, 16, 32, 64, 128):
        yield "yoso", "yoso", {"num_hashes": num_hashes, "hash_bits": 8}
    for hash_bits in (4, 6, 10, 12):
        yield "yoso, other bits", "yoso", {"num_hashes": 32, "hash_bits": hash_bits}
    for hash_bits in (4, 8, 12):
        yield "yoso_expectation", "yoso_expectation", {"hash_bits": hash_bits}
    sizes = [size for size in (16, 32, 64, 128, 256) if size < tokens]
    for size in sizes:
        yield "nystrom", "nystrom", {"num_landmarks": size}
    for family, kind in (("linformer, means", "mean-pool"), ("linformer, random", "linear")):
        for size in sizes:
            yield family, "linformer", {"projected_length": size, "projection": kind}
    for size in sizes:
        yield "window", "window", {"window": size // 2}
    for num_hashes in (1, 2, 4):
        yield "reformer", "reformer", {"num_hashes": num_hashes}
    yield "strided", "strided", {}


def groups(setting: Setting) -> Iterator[Group]:
    """One group for each kind of inputs and length."""
    usual = (4096,) if setting.cuda else (1024,) if setting.quick else (2048,)
    for length in setting.lengths or usual:
        for inputs in ("spread", "clustered"):
            yield group(inputs, setting, (1, HEADS, length, HEAD_DIM))
    if setting.model is not None:
        yield group("real", setting)


def group(
    inputs: str,
    setting: Setting,
    shape: tuple[int, ...] = (),
    chosen: Iterable[Contender] | None = None,
) -> Group:
    """The errors and costs of what is `chosen`, all `contenders` by default.

    "real" inputs are those of the setting's model: (layers · stretches, H, N, D).
    """
    about: Mapping[str, Any] = {}
    if inputs == "real":
        assert setting.model is not None
        draw = partial(_real, setting)
        shape, about = tuple(draw()[0].shape), real.names(setting.model, setting.text)
    else:
        draw = partial(_drawn, shape, inputs, setting)
    batch, heads, length, head_dim = shape
    sizes = {"batch": batch, "heads": heads, "length": length, "head_dim": head_dim}
    entries = []
    for family, method, options in contenders(length) if chosen is None else chosen:
        row = {
            "kind": "error",
            "mode": "forward",
            "method": method,
            "family": family,
            "options": options,
            "inputs": inputs,
            **sizes,
            "dtype": setting.dtype,
            "device": setting.device,
            **about,
        }
        build = partial(_timed, method, options, draw, setting)
        extra = partial(_errors, method, options, draw, setting.seed)
        words = [f"{k}={v}" for k, v in options.items()]
        entries.append(Entry(" ".join([method, *words]), row, build, extra))
    where = f" of {about['model']} on {about['text']}" if about else ""
    return Group(f"{inputs} inputs{where}, {length:,} tokens, batch {batch}", entries)


def _drawn(shape: tuple[int, ...], inputs: str, setting: Setting) -> list[Tensor]:
    return draw_inputs(
        (3, *shape), setting.dtype, setting.device, False, setting.seed, inputs=inputs
    )


def _real(setting: Setting) -> list[Tensor]:
    """One stretch of text in every layer (four on a GPU), all layers in one batch."""
    stretches = 4 if setting.cuda else 1
    joined = (
        torch.cat([x[:stretches] for x in part]) for part in zip(*real.layers(setting), strict=True)
    )
    return [x.to(getattr(torch, setting.dtype)) for x in joined]


def _call(
    method: str, options: Mapping[str, Any], draw: Callable[[], list[Tensor]], seed: int
) -> Call:
    q, k, v = draw()
    options = dict(options)
    if method in ("yoso", "reformer"):
        options["seed"] = seed
    if method == "linformer":
        torch.manual_seed(seed)
        module = longspan.LinformerAttention(
            q.shape[1], max_length=k.shape[2], sharing="key-value", **options
        ).to(q.device, q.dtype)
        function: Callable[..., Tensor] = module
    else:
        function = partial(longspan.attention, method=method, **options)

    def run() -> Tensor:
        with torch.inference_mode():
            return function(q, k, v)

    return run


def _timed(
    method: str, options: Mapping[str, Any], draw: Callable[[], list[Tensor]], setting: Setting
) -> Call:
    call = _call(method, options, draw, setting.seed)
    return fastest_exact(call) if setting.cuda and method == EXACT else call


def _errors(
    method: str,
    options: Mapping[str, Any],
    draw: Callable[[], list[Tensor]],
    seed: int,
    row: Mapping[str, Any],
) -> dict[str, Any]:
    y: Any = _call(method, options, draw, seed)()
    q, k, v = (x.float() for x in draw())
    exact = longspan.softmax(q, k, v)
    limit = exact
    if method in ("yoso", "yoso_expectation"):
        limit = longspan.yoso_expectation(q, k, v, hash_bits=options["hash_bits"])
    return {
        "error_limit": relative_error(y, limit),
        "error_softmax": relative_error(unit(y.float()), unit(exact)),
    }


def relative_error(y: Tensor, wanted: Tensor) -> float:
    """‖y − wanted‖ / ‖wanted‖ over all entries."""
    return float((y.float() - wanted).norm() / wanted.norm())
