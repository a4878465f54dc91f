"""The verbs of YOSO that are matrix products, in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.attention.tiles import Kernel, cdiv

STRETCH = tl.constexpr(256)  # rows of float32 that are added one after another


@triton.jit
def _inverse(norm):
    """1/norm; zero for zero."""
    return tl.where(norm > 0, 1 / tl.where(norm > 0, norm, 1.0), 0.0)


@Kernel
def _norms(
    x, mask, out, rows, tokens, heads,
    MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Norms of rows; zero for masked ones whatever they hold."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    there = row < rows
    ok = there
    if MASKED:
        token = row // (tokens * heads) * tokens + row % tokens
        ok = ok & (tl.load(mask + token, mask=there, other=0) != 0)
    at = row[:, None] * D + d[None, :]
    value = tl.load(x + at, mask=ok[:, None] & (d[None, :] < D), other=0).to(tl.float32)
    tl.store(out + row, tl.sqrt(tl.sum(value * value, axis=1)), mask=there)


def norms(x: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Norms (B, H, N) of the rows of x (B, H, N, D), zero where masked."""
    batch, heads, tokens, channels = x.shape
    out = torch.empty(batch, heads, tokens, dtype=torch.float32, device=x.device)
    _norms[(cdiv(out.numel(), 16),)](
        x, x if key_mask is None else key_mask, out, out.numel(), tokens, heads,
        MASKED=key_mask is not None, D=channels, DP=triton.next_power_of_2(channels), ROWS=16,
    )  # fmt: skip
    return out


@Kernel
def _through_unit(
    grad, unit, inverse, out, rows, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr
):
    """The gradient of a row from that of its unit vector u: (g − (g·u) u) / norm."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    at, there = row[:, None] * D + d[None, :], (row < rows)[:, None] & (d[None, :] < D)
    factor = tl.load(inverse + row, mask=row < rows, other=0)
    g = tl.load(grad + at, mask=there, other=0).to(tl.float32)
    u = tl.load(unit + at, mask=there, other=0).to(tl.float32)
    result = (g - tl.sum(g * u, axis=1)[:, None] * u) * factor[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=there)


def through_unit(grad: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """(g − (g·u) u) / norm for rows of g and u (…, D) and 1/norm (…)."""
    out = torch.empty_like(grad)
    rows, channels = inverse.numel(), grad.shape[-1]
    _through_unit[(cdiv(rows, 16),)](
        grad, unit, inverse, out, rows,
        D=channels, DP=triton.next_power_of_2(channels), ROWS=16,
    )  # fmt: skip
    return out


@triton.jit
def _rows(x, index, there, d, D: tl.constexpr):
    """Rows of x by index, zero where not there: (T, DP)."""
    return tl.load(
        x + index.to(tl.int64)[:, None] * D + d[None, :],
        mask=there[:, None] & (d[None, :] < D),
        other=0,
    )


@triton.jit
def _store_rows(out, index, there, d, value, D: tl.constexpr):
    """Write rows by index."""
    at = out + index.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=there[:, None] & (d[None, :] < D))


@triton.jit
def _zero(out, at, n, D: tl.constexpr, DP: tl.constexpr, T: tl.constexpr):
    """Zero the rows of a list."""
    t, d = tl.arange(0, T), tl.arange(0, DP)
    for start in range(0, n, T):
        there = start + t < n
        index = tl.load(at + start + t, mask=there, other=0)
        _store_rows(out, index, there, d, tl.zeros((T, DP), tl.float32), D)


@triton.jit
def _pairs(
    q, k, v, g, q_norms, k_norms, dq, dk, q_at, k_at, nq, nk,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A bucket of up to T queries and T keys: S = g vᵀ, dq = S k̂, dk = Sᵀ q̂."""
    t, d, e = tl.arange(0, T), tl.arange(0, DP), tl.arange(0, EP)
    q_there, k_there = t < nq, t < nk
    i = tl.load(q_at + t, mask=q_there, other=0)
    j = tl.load(k_at + t, mask=k_there, other=0)
    grad, value = _rows(g, i, q_there, e, E), _rows(v, j, k_there, e, E)
    query, key = _rows(q, i, q_there, d, D), _rows(k, j, k_there, d, D)
    q_scale = _inverse(tl.load(q_norms + i, mask=q_there, other=0))
    k_scale = _inverse(tl.load(k_norms + j, mask=k_there, other=0))
    s = tl.dot(grad, tl.trans(value), input_precision="ieee")
    # The norms go into S, which is rounded anyway: q and k stay as they were given.
    to_q = tl.dot((s * k_scale[None, :]).to(key.dtype), key, input_precision="ieee")
    _store_rows(dq, i, q_there, d, to_q, D)
    s = tl.trans(s * q_scale[:, None]).to(key.dtype)
    _store_rows(dk, j, k_there, d, tl.dot(s, query, input_precision="ieee"), D)


@triton.jit
def _sum_outer(
    a, b, a_norms, table, a_at, begin, end, d, e,
    D: tl.constexpr, E: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """table + Σ_j â_j b_jᵀ over a stretch of a list."""
    t = tl.arange(0, T)
    for start in range(begin, end, T):
        there = start + t < end
        j = tl.load(a_at + start + t, mask=there, other=0)
        row = _rows(a, j, there, d, D)
        unit = row * _inverse(tl.load(a_norms + j, mask=there, other=0))[:, None]
        other = _rows(b, j, there, e, E)
        table = tl.dot(tl.trans(unit.to(row.dtype)), other, table, input_precision="ieee")
    return table


@triton.jit
def _table(
    a, b, c, a_norms, out, a_at, na, c_at, nc,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EB: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """out_i = (Σ_j â_j b_jᵀ) c_i, rows j of one list and i of another, EB columns at a time.

    However many rows a bucket has, the work is in proportion to them.
    """
    t, d = tl.arange(0, T), tl.arange(0, DP)
    for e0 in tl.static_range(0, E, EB):
        e = e0 + tl.arange(0, EB)
        table = tl.zeros((DP, EB), tl.float32)
        if a.dtype.element_ty == tl.float32:
            # Added one after another, 10,000 rows lose three bits; in stretches, half a one.
            for begin in range(0, na, STRETCH):
                end = min(begin + STRETCH, na)
                part = tl.zeros((DP, EB), tl.float32)
                table += _sum_outer(a, b, a_norms, part, a_at, begin, end, d, e, D, E, T)
        else:
            table = _sum_outer(a, b, a_norms, table, a_at, 0, na, d, e, D, E, T)
        small = tl.trans(table).to(a.dtype.element_ty)
        tl.debug_barrier()  # what the last columns stored is read below by other threads
        for start in range(0, nc, T):
            there = start + t < nc
            i = tl.load(c_at + start + t, mask=there, other=0)
            value = tl.dot(_rows(c, i, there, e, E), small, input_precision="ieee")
            if e0 > 0:
                value += _rows(out, i, there, d, D).to(tl.float32)
            _store_rows(out, i, there, d, value, D)


@Kernel
def _outer_sums(
    q, k, v, g, q_norms, k_norms, dq, dk, q_list, k_list, q_first, k_first,
    head0, queries, keys, hashes, used, buckets,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, EB: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """One bucket of one hash, both gradients: each of its rows is written, once."""
    c, group = tl.program_id(0) % buckets, (tl.program_id(0) // buckets).to(tl.int64)
    bh = head0 + group // used
    at = bh * hashes + group % used
    q_first += at * (buckets + 1) + c
    k_first += at * (buckets + 1) + c
    q0, k0 = tl.load(q_first), tl.load(k_first)
    nq, nk = (tl.load(q_first + 1) - q0).to(tl.int32), (tl.load(k_first + 1) - k0).to(tl.int32)
    q_at, k_at = q_list + at * queries + q0, k_list + at * keys + k0
    dq += group * queries * D
    dk += group * keys * D
    if nk == 0:
        _zero(dq, q_at, nq, D, DP, T)
    elif nq == 0:
        _zero(dk, k_at, nk, D, DP, T)
    else:
        q += bh * queries * D
        k += bh * keys * D
        v += bh * keys * E
        g += bh * queries * E
        q_norms += bh * queries
        k_norms += bh * keys
        if (nq <= 16) & (nk <= 16):
            _pairs(q, k, v, g, q_norms, k_norms, dq, dk, q_at, k_at, nq, nk,
                   D, DP, E, EP, 16)  # fmt: skip
        elif (nq <= T) & (nk <= T):
            _pairs(q, k, v, g, q_norms, k_norms, dq, dk, q_at, k_at, nq, nk,
                   D, DP, E, EP, T)  # fmt: skip
        else:
            _table(k, v, g, k_norms, dq, k_at, nk, q_at, nq, D, DP, E, EB, T)
            _table(q, g, v, q_norms, dk, q_at, nq, k_at, nk, D, DP, E, EB, T)


@Kernel
def _sum_hashes(
    parts, x, norm, out, scale, row0, rows, tokens, hashes,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up what each hash gave a row, and take it through the norm of the row."""
    local = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, d = row0 + local, tl.arange(0, DP)
    inverse = _inverse(tl.load(norm + row, mask=local < rows, other=0))
    there = (inverse != 0)[:, None] & (d[None, :] < D)  # masked rows were never written
    at = parts + (local // tokens * hashes * tokens + local % tokens)[:, None] * D + d[None, :]
    total = tl.zeros((ROWS, DP), tl.float32)
    for _ in range(hashes):
        total += tl.load(at, mask=there, other=0).to(tl.float32)
        at += tokens * D
    u = tl.load(x + row[:, None] * D + d[None, :], mask=there, other=0).to(tl.float32)
    u = u * inverse[:, None]
    result = (total - tl.sum(total * u, axis=1)[:, None] * u) * (inverse * scale)[:, None]
    ok = (local < rows)[:, None] & (d[None, :] < D)
    tl.store(out + row[:, None] * D + d[None, :], result.to(out.dtype.element_ty), mask=ok)


def outer_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    key_mask: Tensor | None,
    q_lists: tuple[Tensor, ...],
    k_lists: tuple[Tensor, ...],
    scale: float,
    used: int,
    part_bytes: int,
) -> tuple[Tensor, Tensor]:
    """dQ_i = scale Σ_h Σ_j [same bucket] (g_i·v_j) k̂_j through the norm of q_i, and dK likewise.

    Rows (B, H, N, D) in one dtype, `verbs.Lists`, of which the first `used` hashes count. Each hash
    writes its part of every row, and the parts are added up: no atomics, the same order on every
    run. Heads take turns so that parts stay within `part_bytes`.
    """
    batch, heads, queries, channels = q.shape
    keys, width = v.shape[2:]
    (q_list, q_first, *_), (k_list, k_first, *_) = q_lists, k_lists
    hashes, buckets = q_first.shape[2], q_first.shape[3] - 1
    q_norms, k_norms = norms(q), norms(k, key_mask)
    padded = [max(16, triton.next_power_of_2(n)) for n in (channels, width)]
    wide = max(padded) > 128  # shorter tiles, which fit into shared memory
    # Without tensor cores, tiles are in registers, which more warps have, and of which fewer
    # columns need less: with one warp a bucket and 64 columns, threads have a stack of 3 KB.
    exact = q.dtype == torch.float32
    columns, warps = (32, 4) if exact else (64, 1)
    if max(padded) > 64:
        warps = 8 if exact else 4
    # The sixteen pieces of a wide row are added up in its part: that would round it as often.
    dtype = torch.float32 if wide else q.dtype
    size = used * (queries + keys) * channels * dtype.itemsize
    step = min(batch * heads, max(1, part_bytes // size))
    parts = [q.new_empty(step, used, n, channels, dtype=dtype) for n in (queries, keys)]
    grads = torch.empty_like(q), torch.empty_like(k)
    for head in range(0, batch * heads, step):
        now = min(step, batch * heads - head)
        _outer_sums[(now * used * buckets,)](
            q, k, v, g, q_norms, k_norms, *parts, q_list, k_list, q_first, k_first,
            head, queries, keys, hashes, used, buckets,
            D=channels, DP=padded[0], E=width, EP=padded[1],
            EB=min(padded[1], 16 if wide else columns), T=16 if wide else 32,
            num_warps=warps, num_stages=1,
        )  # fmt: skip
        sides = zip(parts, (q, k), (q_norms, k_norms), grads, (queries, keys), strict=True)
        for part, x, norm, grad, tokens in sides:
            _sum_hashes[(cdiv(now * tokens, 16),)](
                part, x, norm, grad, scale, head * tokens, now * tokens, tokens, used,
                D=channels, DP=padded[0], ROWS=16, num_warps=4,
            )  # fmt: skip
    return grads
