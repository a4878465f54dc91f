"""`spectrum`: is real attention of low rank, as Linformer says, and what does its E learn?

A row of kind "spectrum" holds, for one layer of a model, the share of the sum of singular values of
the N × N attention matrices that the largest j of them have (Σ_{i≤j} σ_i / Σ σ_i, as in figure 1 of
the Linformer paper), by head, averaged over stretches of text; "random" weights are the control.

A row of kind "projection" describes Linformer's E (for keys) and F (for values) of one layer,
before and after they were fitted to give exact attention's output on that layer's own queries, keys
and values: the entropy of rows, over how many tokens they spread, how much they look like
averaging."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import longspan
from longspan.bench import real
from longspan.bench.suite import Entry, Group, Setting

POINTS = 32  # of a cumulative curve
STEPS, RATE, BATCH = 400, 3e-3, 4
PICTURE = (32, 64)


def groups(setting: Setting) -> Iterator[Group]:
    """Layer by layer: trained and random weights, then E."""
    if setting.model is None:
        raise ValueError(
            "model must be named for the suite spectrum, a folder or a name of Hugging Face's, "
            "as in --model sentence-transformers/all-MiniLM-L6-v2, got none"
        )
    about: dict[str, Any] = {**real.names(setting.model, setting.text)}
    where = f"{about['model']} on {about['text']}"
    found = real.layers(setting)
    batch, heads, length, head_dim = found[0][0].shape
    about |= {"length": length, "batch": batch, "heads": heads, "head_dim": head_dim}
    for weights in ("trained", "random"):
        entries = []
        for layer in range(len(found)):
            row: dict[str, Any] = {
                "kind": "spectrum",
                "method": "softmax",
                "weights": weights,
                "layer": layer,
            }
            extra = partial(_spectrum, setting, weights, layer)
            entries.append(Entry(f"layer {layer}, {weights}", {**row, **about}, extra=extra))
        yield Group(f"singular values, {weights} weights, {where}", entries)
    chosen = (0, len(found) - 1) if setting.quick else range(len(found))
    entries = []
    for layer in dict.fromkeys(chosen):
        row = {"kind": "projection", "method": "linformer", "layer": layer}
        row |= {"options": {"projected_length": length // 4}}
        extra = partial(_projection, setting, layer, length // 4)
        entries.append(Entry(f"layer {layer}", {**row, **about}, extra=extra))
    yield Group(f"what E learns, {where}", entries)


def _spectrum(setting: Setting, weights: str, layer: int, row: Mapping[str, Any]) -> dict[str, Any]:
    q, k, _ = real.layers(setting, weights)[layer]
    stretches = 2 if setting.quick else 8
    shares = cumulative(q[:stretches], k[:stretches])  # (H, N)
    length = shares.shape[1]
    places = sorted({max(1, round(length ** (i / (POINTS - 1)))) for i in range(POINTS)})
    return {
        "places": places,
        "cumulative": [[round(float(s[j - 1]), 4) for j in places] for s in shares],
        "at_quarter": [round(float(s[length // 4 - 1]), 4) for s in shares],
    }


def cumulative(q: Tensor, k: Tensor) -> Tensor:
    """Σ_{i≤j} σ_i / Σ σ_i of softmax(q kᵀ/√D), mean over the batch: (B, H, N, D) → (H, N)."""
    total = q.new_zeros(q.shape[1], q.shape[2])
    for one_q, one_k in zip(q.float(), k.float(), strict=True):
        weights = (one_q @ one_k.mT * q.shape[-1] ** -0.5).softmax(-1)
        values = torch.linalg.svdvals(weights)
        total += values.cumsum(-1) / values.sum(-1, keepdim=True)
    return total / len(q)


def _projection(
    setting: Setting, layer: int, projected: int, row: Mapping[str, Any]
) -> dict[str, Any]:
    inputs = real.layers(setting)[layer]
    steps = STEPS // 8 if setting.quick else STEPS
    before, (e, f), errors = fit(inputs, projected, steps, setting.seed)
    return {
        "steps": steps,
        "error_before": errors[0],
        "error_after": errors[1],
        "untrained": describe(before),
        "trained": describe(e),
        "trained_values": describe(f),
        "picture": _picture(e),
        "picture_values": _picture(f),
    }


def fit(
    inputs: tuple[Tensor, Tensor, Tensor], projected: int, steps: int, seed: int
) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[float, float]]:
    """Learn E and F for one layer: E before, both after, and the error on stretches held out.

    All but the last quarter of the batch is learned from, BATCH at a time, with Adam on the
    relative squared error.
    """
    q, k, v = (x.float().clone() for x in inputs)
    held = max(1, len(q) // 4)
    exact = longspan.softmax(q, k, v)
    torch.manual_seed(seed)
    std = k.shape[2] ** -0.5
    e, f = (
        (std * torch.randn(projected, k.shape[2])).to(q.device).requires_grad_() for _ in range(2)
    )
    before = e.detach().clone()
    optimizer = torch.optim.Adam([e, f], RATE)

    def error(part: slice | Tensor) -> Tensor:
        y = longspan.linformer(q[part], k[part], v[part], e, f)
        return (y - exact[part]).square().sum() / exact[part].square().sum()

    with torch.no_grad():
        first = math.sqrt(float(error(slice(-held, None))))
    for _ in range(steps):
        optimizer.zero_grad()
        error(torch.randint(max(1, len(q) - held), (BATCH,))).backward()
        optimizer.step()
    with torch.no_grad():
        last = math.sqrt(float(error(slice(-held, None))))
    return before, (e.detach(), f.detach()), (first, last)


def describe(e: Tensor) -> dict[str, float]:
    """Entropy (share of log N), support (tokens) and likeness to a mean of neighbours, of rows.

    Entropy is that of |E| scaled to sum one; its exponential is the support. Likeness is the
    largest cosine of a row with a mean of N/k neighbouring tokens, wherever they are: 1 for such a
    mean, about √(2 ln(N) k/N) for random numbers.
    """
    projected, length = e.shape
    share = e.abs() / e.abs().sum(-1, keepdim=True)
    entropy = -(share * share.clamp(min=1e-12).log()).sum(-1)
    width = max(1, length // projected)
    sums = e.cumsum(-1)
    boxes = torch.cat([sums[:, width - 1 : width], sums[:, width:] - sums[:, :-width]], dim=1)
    likeness = boxes.abs().amax(-1) / (math.sqrt(width) * e.norm(dim=-1))
    return {
        "entropy": float(entropy.mean() / math.log(length)),
        "support": float(entropy.exp().mean()),
        "likeness": float(likeness.mean()),
    }


def _picture(e: Tensor) -> list[list[float]]:
    """|E| in coarse pixels, its rows in the order of where they look."""
    place = (e.abs() * torch.arange(e.shape[1], device=e.device)).sum(-1) / e.abs().sum(-1)
    small = torch.nn.functional.adaptive_avg_pool2d(e.abs()[place.argsort()][None, None], PICTURE)
    return [[round(float(x), 5) for x in row] for row in small[0, 0]]
