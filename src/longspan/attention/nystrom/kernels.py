"""Nyström attention on NVIDIA GPUs: both passes as torch.library ops.

    q̃, k̃  means of segments    B v = softmax(q̃ kᵀ) v    W = Z (B v)    output = softmax(q k̃ᵀ) W

No matrix of tokens by landmarks exists in either pass. The gradients of q and k are written once:
what they get through their landmarks is added, by segment, by the pass that writes them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention import dispatch, ops, tape
from longspan.attention.nystrom import reference

MAX_CHANNELS = 256
MAX_LANDMARKS = 512
IN_ONE_PROGRAM = 128  # landmarks; products of more are left to torch, which spreads them


def why_not(device: torch.device) -> list[str]:
    """Why the kernels cannot run on a device; empty where they can."""
    return dispatch.why_not_cuda("nystrom", device)


def why_not_these(q: Tensor, v: Tensor, num_landmarks: int) -> list[str]:
    """Why the kernels cannot run on these tensors; empty where they can."""
    reasons = dispatch.why_not_these("nystrom", q, v, MAX_CHANNELS)
    if num_landmarks > MAX_LANDMARKS:
        reasons.append(f"nystrom has no fused kernel for more than {MAX_LANDMARKS} landmarks")
    return reasons


def nystrom(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    init: str,
    scale: float | None,
) -> Tensor:
    """Arguments as in `longspan.nystrom`."""
    if q.shape[0] == 0:
        return dispatch.nothing(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    inputs = q, k, v, key_mask, num_landmarks, num_iterations, init == "original", scale
    if dispatch.learns(q, k, v):
        return _Fused.apply(*inputs)
    (y,) = torch.ops.longspan.nystrom_forward(*inputs, False)
    return y


class _Fused(torch.autograd.Function):
    """The two ops as one differentiable function."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        num_landmarks: int,
        num_iterations: int,
        original: bool,
        scale: float,
    ) -> Tensor:
        y, *saved = torch.ops.longspan.nystrom_forward(
            q, k, v, key_mask, num_landmarks, num_iterations, original, scale, True
        )
        ctx.save_for_backward(q, k, v, key_mask, y, *saved)
        ctx.options = num_iterations, original, scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        grads = torch.ops.longspan.nystrom_backward(g, *ctx.saved_tensors, *ctx.options)
        return *grads, None, None, None, None, None


@dataclass(frozen=True)
class Segments:
    """Where the segments of queries or keys lie; all None where they are even and all full."""

    mask: Tensor | None = None  # (B, N)
    bounds: tuple[Tensor, Tensor, Tensor] | None = None  # first, last + 1 (B, F); length (B,)
    there: Tensor | None = None  # (B, F), which hold a token
    segment: Tensor | None = None  # (B, N) int32, −1 where masked
    sizes: Tensor | None = None  # (B, F)

    @property
    def cut(self) -> tuple[Tensor, ...]:
        """What `segment_means` is told of them; nothing of even ones."""
        return () if self.mask is None or self.bounds is None else (self.mask, *self.bounds)


def segments(mask: Tensor | None, batch: int, tokens: int, few: int, device: Any) -> Segments:
    """As `base.segment_means` cuts them, from running counts and without a host's look at them."""
    if mask is None:
        mask = torch.ones(batch, tokens, dtype=torch.bool, device=device)
    count = mask.cumsum(-1)
    length = count[:, -1:].contiguous()
    edges = (torch.arange(few + 1, device=device) * length + few - 1) // few
    first = torch.searchsorted(count, edges[:, :-1] + 1)
    last = torch.searchsorted(count, edges[:, 1:].contiguous()) + 1
    sizes = edges.diff(dim=-1)
    segment = torch.where(mask, (count - 1) * few // length.clamp(min=1), -1).int()
    return Segments(mask.contiguous(), (first, last, length[:, 0]), sizes > 0, segment, sizes)


def both_segments(q: Tensor, k: Tensor, key_mask: Tensor | None, few: int) -> list[Segments]:
    """Of queries and keys: uneven where a mask hides keys or there are too few tokens."""
    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    if key_mask is None and min(queries, keys) >= few:
        return [Segments(), Segments()]
    by_key = segments(key_mask, batch, keys, few, k.device)
    if queries == keys:  # one sequence: masked places do not enter the queries' landmarks either
        return [by_key, by_key]
    return [segments(None, batch, queries, few, q.device), by_key]


def lengths(cut: list[Segments]) -> tuple[Tensor, Tensor] | None:
    """Valid queries and keys (B,) where segments are uneven."""
    if cut[0].bounds is None or cut[1].bounds is None:
        return None
    return cut[0].bounds[2], cut[1].bounds[2]


@ops.op
@tape.played
def nystrom_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    original: bool,
    scale: float,
    keep: bool,
) -> list[Tensor]:
    """The output; if the backward is to follow, all that it needs to `keep`: q̃, k̃, B v and W in
    float32; log₂-sum-exp of both softmaxes; norms of A."""
    from longspan.attention import few, tiles
    from longspan.attention.nystrom import triton as verbs

    q, k, v = (tiles.rows(x) for x in (q, k, v))
    cut = by_query, by_key = both_segments(q, k, key_mask, num_landmarks)
    q_means, k_means = verbs.segment_means(q, k, num_landmarks, by_query.cut, by_key.cut)
    bv, b_lse = few.read_many(k, v, q_means, by_key.mask, scale)
    norms = bv.new_empty(0)
    if num_landmarks > IN_ONE_PROGRAM:
        a = _landmark_softmax(q_means, k_means, cut, scale)
        w = reference.pseudo_inverse(a, num_iterations, "original" if original else "exact") @ bv
        w = _own_values(w, v, by_key)
    else:
        first = None if by_key.bounds is None else by_key.bounds[0]
        if original:
            norms = verbs.norms(q_means, k_means, lengths(cut), scale, q.dtype)
        given = norms.amax().expand_as(norms).contiguous() if original else None
        w = verbs.solve(q_means, k_means, bv, v, lengths(cut), first, given, num_iterations, scale)
    y, f_lse = few.read_few(q, k_means, w, by_key.there, scale)
    return [y, q_means, k_means, bv, w, f_lse, b_lse, norms] if keep else [y]


@ops.fake(nystrom_forward)
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    num_landmarks: int,
    num_iterations: int,
    original: bool,
    scale: float,
    keep: bool,
) -> list[Tensor]:
    batch, heads, queries, channels = q.shape
    width = v.shape[3]
    y = v.new_empty((batch, heads, queries, width))
    if not keep:
        return [y]

    def wide(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    small = batch, heads, num_landmarks
    from_kernel = original and num_landmarks <= 128
    return [
        y,
        wide(*small, channels),
        wide(*small, channels),
        wide(*small, width),
        wide(*small, width),
        wide(batch, heads, queries),
        wide(*small),
        wide(batch, heads) if from_kernel else wide(0),
    ]


@ops.op
@tape.played
def nystrom_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    y: Tensor,
    q_means: Tensor,
    k_means: Tensor,
    bv: Tensor,
    w: Tensor,
    f_lse: Tensor,
    b_lse: Tensor,
    norms: Tensor,
    num_iterations: int,
    original: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    from longspan.attention import few_backward, tiles
    from longspan.attention.nystrom import triton_backward as verbs

    g, q, k, v = (tiles.rows(x) for x in (g, q, k, v))
    landmarks = q_means.shape[2]
    cut = by_query, by_key = both_segments(q, k, key_mask, landmarks)
    there = by_key.there
    dk_parts, dw = few_backward.few_gradients(q, g, k_means, w, f_lse, scale, y=y, there=there)
    if landmarks > IN_ONE_PROGRAM:
        dbv, dq_means, table_k, table_v = _solve_backward(
            q_means, k_means, bv, dw.sum(0), dk_parts.sum(0), cut,
            _sizes(by_key, k.shape[2], landmarks, k.device), num_iterations, original, scale,
        )  # fmt: skip
        delta = (dbv * bv).sum(-1)
    else:
        given = norms.amax().expand_as(norms).contiguous() if original else None
        dbv, delta, da, dnorm, table_v = verbs.solve_backward(
            q_means, k_means, bv, dw, lengths(cut), given, num_iterations, scale, q.dtype
        )
        if original:  # all heads start from the norm of the largest
            largest = norms == norms.amax()
            dnorm = torch.where(largest, dnorm.sum() / largest.sum(), 0)
        dq_means, table_k = verbs.landmark_gradients(
            q_means, k_means, da, dnorm, dk_parts, lengths(cut), k.shape[2], scale, q.dtype
        )
    few_side = k, v, q_means, dbv, b_lse, scale
    dq_parts, _ = few_backward.few_gradients(*few_side, delta=delta, mask=by_key.mask)
    q_length = None if by_query.bounds is None else by_query.bounds[2]
    table_q = verbs.mean_gradients(dq_means, dq_parts, q_length, q.shape[2])
    dk, dv = few_backward.many_gradients(
        *few_side, delta=delta, mask=by_key.mask, segment=by_key.segment,
        tables=(table_k, None if by_key.bounds is None else table_v),
    )  # fmt: skip
    dq, _ = few_backward.many_gradients(
        q, g, k_means, w, f_lse, scale, y=y, there=there, segment=by_query.segment,
        tables=(table_q, None),
    )  # fmt: skip
    return dq, dk, dv


@ops.fake(nystrom_backward)
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _sizes(cut: Segments, tokens: int, few: int, device: Any) -> Tensor | int:
    """Tokens of each segment, at least one, against (B, H, F, D)."""
    if cut.sizes is not None:
        return cut.sizes.clamp(min=1)[:, None, :, None]
    if tokens % few == 0:
        return tokens // few
    edges = (torch.arange(few + 1, device=device) * tokens + few - 1) // few
    return edges.diff()[:, None]


def _landmark_softmax(
    q_means: Tensor, k_means: Tensor, cut: list[Segments], scale: float
) -> Tensor:
    """A of every head, where there are too many landmarks for one program."""
    scores = q_means @ k_means.mT * scale
    q_there, k_there = cut[0].there, cut[1].there
    if q_there is None or k_there is None:
        return scores.softmax(-1)
    return reference.softmax_over(scores, k_there[:, None, None]) * q_there[:, None, :, None]


def _own_values(w: Tensor, v: Tensor, by_key: Segments) -> Tensor:
    """With no more keys than landmarks, the values themselves."""
    if by_key.bounds is None or by_key.there is None:
        return w
    first, _, length = by_key.bounds
    alone = (length <= w.shape[2])[:, None, None, None]
    keep = by_key.there & alone[:, 0, :, 0]
    index = torch.where(keep, first, 0)[:, None, :, None].expand_as(w)
    return torch.where(alone, v.gather(2, index).float().masked_fill(~keep[:, None, :, None], 0), w)


def _solve_backward(
    q_means: Tensor,
    k_means: Tensor,
    bv: Tensor,
    dw: Tensor,
    dk_means: Tensor,
    cut: list[Segments],
    key_sizes: Tensor | int,
    num_iterations: int,
    original: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of B v, q̃, k̃ (over its segment's size) and v's own, by torch's products."""
    table_v = torch.zeros_like(dw)
    if cut[1].bounds is not None:
        alone = (cut[1].bounds[2] <= dw.shape[2])[:, None, None, None]
        table_v, dw = torch.where(alone, dw, 0), torch.where(alone, 0, dw)
    a = _landmark_softmax(q_means, k_means, cut, scale)
    columns, rows = a.sum(-2, keepdim=True), a.sum(-1, keepdim=True)
    norm = columns.amax(-1, keepdim=True) * rows.amax(-2, keepdim=True)
    start = norm.amax() if original else norm
    start = start.masked_fill(start == 0, 1)
    eye = torch.eye(a.shape[-1], device=a.device)
    kept = [a.mT / start]
    for _ in range(num_iterations):
        x = a @ kept[-1]
        kept.append(0.25 * kept[-1] @ (13 * eye - x @ (15 * eye - x @ (7 * eye - x))))
    dbv = kept.pop().mT @ dw
    dz, da = dw @ bv.mT, torch.zeros_like(a)
    for z in reversed(kept):
        x = a @ z
        m2 = 15 * eye - 7 * x + x @ x
        dm3 = 0.25 * z.mT @ dz
        dz = 0.25 * dz @ (13 * eye - x @ m2).mT
        dm2 = -x.mT @ dm3
        dx = dm2 @ x.mT + x.mT @ dm2 - 7 * dm2 - dm3 @ m2.mT
        da += dx @ z.mT
        dz += a.mT @ dx
    da += dz.mT / start
    dnorm = -(dz.mT * a).sum((-2, -1), keepdim=True) / start.square()
    if original:
        largest = norm == norm.amax()
        dnorm = torch.where(largest, dnorm.sum() / largest.sum(), 0)
    # A row's sum is 1 whatever its scores: only the largest column of the norm has a gradient.
    highest = (columns == columns.amax(-1, keepdim=True)).float()
    da += highest / highest.sum(-1, keepdim=True) * dnorm * rows.amax(-2, keepdim=True)
    s = a * (da - (a * da).sum(-1, keepdim=True)) * scale
    return dbv, s @ k_means, (dk_means + s.mT @ q_means) / key_sizes, table_v
