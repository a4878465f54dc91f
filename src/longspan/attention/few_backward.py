"""The gradients of `few.read_few` and `few.read_many`, in Triton.

`read_few` has its softmax by row of the many (OWN), `read_many` by row of the few. With p the
weights, g the gradient of the output, and Δ = Σ p (g·value) of a softmax: dS = p (g·value − Δ).

EVEN is for the few that fill all their tiles.

             a     b   c     e          da     db    dc          de
read_few     q     g   k     v          dq     –     dk          dv
read_many    k     v   q     g          dk     dv    dq          –
"""

import torch
import triton.language as tl
from torch import Tensor

from longspan.attention.few import Config, _run, choose
from longspan.attention.tiles import LOG2E, Kernel, arithmetic, cdiv, load_rows, padded, store_rows


@Kernel
def _many_gradients(
    a, b, c, e, y, mask, there, lse, delta, table_a, table_b, segment, da, db,
    heads, many, few, segments, scale, a_b, a_h, a_n, b_b, b_h, b_n,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, OWN: tl.constexpr,
    MANY_MASKED: tl.constexpr, FEW_MASKED: tl.constexpr, TABLE_A: tl.constexpr,
    TABLE_B: tl.constexpr, GIVEN: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, F: tl.constexpr, TILES: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """M rows of da and, where the few own the softmax, of db."""
    blocks = tl.cdiv(many, M)
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    first = tl.program_id(0) % blocks * M
    m, f = tl.arange(0, M), tl.arange(0, F)
    a += bh // heads * a_b + bh % heads * a_h + first.to(tl.int64) * a_n
    b += bh // heads * b_b + bh % heads * b_h + first.to(tl.int64) * b_n
    c += bh * few * D
    e += bh * few * E
    row = bh * many + first + m
    real = first + m < many
    seen = real
    if MANY_MASKED:
        seen &= tl.load(mask + bh // heads * many + first + m, mask=real, other=0) != 0
    x = load_rows(a, m, a_n, seen, D, DP)
    z = load_rows(b, m, b_n, seen, E, EP)
    mean = tl.zeros((M,), tl.float32)
    norm = mean
    if OWN:
        norm = tl.load(lse + row, mask=real, other=float("inf"))
        if TILES > 1:
            out = load_rows(y, row, E, real, E, EP).to(tl.float32)
            mean = tl.sum(out * z.to(tl.float32), axis=1)
    to_a = tl.zeros((M, DP), tl.float32)
    to_b = tl.zeros((M, EP), tl.float32)
    for tile in range(TILES):
        j = tile * F + f
        ok = j < few
        near = load_rows(c, j, D, ok, D, DP)
        far = load_rows(e, j, E, ok, E, EP)
        score = tl.dot(x, tl.trans(near), input_precision=PRECISION) * (scale * LOG2E)
        inside = tl.dot(z, tl.trans(far), input_precision=PRECISION)
        if FEW_MASKED:
            ok &= tl.load(there + bh // heads * few + j, mask=ok, other=0) != 0
        if OWN:
            p = tl.exp2(score - norm[:, None])
            if FEW_MASKED or not EVEN:
                p = tl.where(ok[None, :], p, 0.0)
            if TILES == 1:
                mean = tl.sum(p * inside, axis=1)
            s = p * (inside - mean[:, None])
        else:
            norms = tl.load(lse + bh * few + j, mask=ok, other=float("inf"))
            means = tl.load(delta + bh * few + j, mask=ok, other=0)
            p = tl.exp2(score - norms[None, :])
            s = p * (inside - means[None, :])
            to_b = tl.dot(p.to(x.dtype), far, to_b, input_precision=PRECISION)
        to_a = tl.dot(s.to(x.dtype), near, to_a, input_precision=PRECISION)
    to_a = tl.where(seen[:, None], to_a * scale, 0.0)
    if TABLE_A:
        if GIVEN:
            part = tl.load(segment + bh // heads * many + first + m, mask=real, other=-1)
        else:
            part = tl.where(real, ((first + m).to(tl.int64) * segments // many).to(tl.int32), -1)
        to_a += load_rows(table_a + bh * segments * D, part, D, part >= 0, D, DP)
        if TABLE_B:
            to_b += load_rows(table_b + bh * segments * E, part, E, part >= 0, E, EP)
    store_rows(da, row, D, real, to_a, D, DP)
    if not OWN:
        store_rows(db, row, E, real, tl.where(seen[:, None], to_b, 0.0), E, EP)


def many_gradients(
    a: Tensor, b: Tensor, c: Tensor, e: Tensor, lse: Tensor, scale: float, *,
    y: Tensor | None = None, delta: Tensor | None = None, mask: Tensor | None = None,
    there: Tensor | None = None, tables: tuple[Tensor | None, Tensor | None] = (None, None),
    segment: Tensor | None = None, config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """da, and db of `read_many` (which gives Δ as `delta`; `read_few` gives its output y).

    Rows of `tables`, (B, H, S, D) and (B, H, S, E) in float32, are added to the rows of da and db
    by their segment: ⌊i S / N⌋, or as `segment` (B, N) says, −1 for none.
    """
    batch, heads, many, channels = a.shape
    few, width = e.shape[2:]
    config = config or choose("many_gradients", a.dtype, channels, width)
    own = y is not None
    da = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    db = da if own else torch.empty(b.shape, dtype=b.dtype, device=b.device)
    size = min(config.few, padded(few))
    some = lambda x: a if x is None else x  # noqa: E731  a pointer that is not followed
    segments = 1 if tables[0] is None else tables[0].shape[2]
    _many_gradients[(cdiv(many, config.many) * batch * heads,)](
        a, b, c, e, some(y), some(mask), some(there), lse, some(delta), some(tables[0]),
        some(tables[1]), some(segment), da, db, heads, many, few, segments, float(scale),
        *a.stride()[:3], *b.stride()[:3],
        D=channels, DP=padded(channels), E=width, EP=padded(width), OWN=own,
        MANY_MASKED=mask is not None, FEW_MASKED=there is not None,
        TABLE_A=tables[0] is not None, TABLE_B=tables[1] is not None, GIVEN=segment is not None,
        EVEN=few % size == 0, PRECISION=arithmetic(a.dtype), M=config.many, F=size,
        TILES=cdiv(few, size), LOG2E=LOG2E,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return da, db


@Kernel
def _few_gradients(
    a, b, c, e, y, mask, there, lse, delta, dc, de, groups, heads, many, few, run, scale,
    a_b, a_h, a_n, b_b, b_h, b_n,
    D: tl.constexpr, DP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, OWN: tl.constexpr,
    MANY_MASKED: tl.constexpr, FEW_MASKED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr, M: tl.constexpr, F: tl.constexpr, TILES: tl.constexpr,
    LOG2E: tl.constexpr,
):  # fmt: skip
    """What a run of the many gives F rows of dc and, where the many own the softmax, of de."""
    runs = tl.cdiv(many, run)
    pid = tl.program_id(0)
    bh = (pid // (TILES * runs)).to(tl.int64)
    tile, part = pid // runs % TILES, pid % runs
    begin = part * run
    end = tl.minimum(begin + run, many)
    m, f = tl.arange(0, M), tile * F + tl.arange(0, F)
    a += bh // heads * a_b + bh % heads * a_h + begin.to(tl.int64) * a_n
    b += bh // heads * b_b + bh % heads * b_h + begin.to(tl.int64) * b_n
    mask += bh // heads * many
    ok = f < few
    near = load_rows(c + bh * few * D, f, D, ok, D, DP)
    far = load_rows(e + bh * few * E, f, E, ok, E, EP)
    norm = tl.zeros((F,), tl.float32)
    mean = norm
    if not OWN:
        norm = tl.load(lse + bh * few + f, mask=ok, other=float("inf"))
        mean = tl.load(delta + bh * few + f, mask=ok, other=0)
    if FEW_MASKED:
        ok &= tl.load(there + bh // heads * few + f, mask=ok, other=0) != 0
    to_c = tl.zeros((F, DP), tl.float32)
    to_e = tl.zeros((F, EP), tl.float32)
    for start in range(begin, end, M):
        seen = start + m < end
        row = bh * many + start + m
        if OWN:
            norms = tl.load(lse + row, mask=seen, other=float("inf"))
        if MANY_MASKED:
            seen &= tl.load(mask + start + m, mask=seen, other=0) != 0
        x = load_rows(a, m, a_n, seen, D, DP)
        z = load_rows(b, m, b_n, seen, E, EP)
        score = tl.dot(near, tl.trans(x), input_precision=PRECISION) * (scale * LOG2E)
        inside = tl.dot(far, tl.trans(z), input_precision=PRECISION)
        if OWN:
            p = tl.exp2(score - norms[None, :])
            if FEW_MASKED or not EVEN:
                p = tl.where(ok[:, None], p, 0.0)
            if TILES == 1:
                means = tl.sum(p * inside, axis=0)
            else:
                out = load_rows(y, row, E, seen, E, EP).to(tl.float32)
                means = tl.sum(out * z.to(tl.float32), axis=1)
            s = p * (inside - means[None, :])
            to_e = tl.dot(p.to(x.dtype), z, to_e, input_precision=PRECISION)
        else:
            # A hidden key's score is 0, which may be far more than those that norm is of.
            gap = tl.where(seen[None, :], score - norm[:, None], float("-inf"))
            s = tl.exp2(gap) * (inside - mean[:, None])
        to_c = tl.dot(s.to(x.dtype), x, to_c, input_precision=PRECISION)
        a += M * a_n
        b += M * b_n
    row = (part.to(tl.int64) * groups + bh) * few + f
    store_rows(dc, row, D, f < few, to_c * scale, D, DP)
    if OWN:
        store_rows(de, row, E, f < few, to_e, E, EP)


def few_gradients(
    a: Tensor, b: Tensor, c: Tensor, e: Tensor, lse: Tensor, scale: float, *,
    y: Tensor | None = None, delta: Tensor | None = None, mask: Tensor | None = None,
    there: Tensor | None = None, config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Parts (runs, B, H, F, D) of dc and, of `read_few`, (runs, B, H, F, E) of de, in float32."""
    batch, heads, many, channels = a.shape
    few, width = e.shape[2:]
    config = config or choose("few_gradients", a.dtype, channels, width)
    own = y is not None
    size = min(config.few, padded(few))
    tiles = cdiv(few, size)
    run = _run(many, batch * heads * tiles, config.many)
    runs = cdiv(many, run)
    dc, de = (
        torch.empty(runs, batch, heads, few, n, dtype=torch.float32, device=a.device)
        for n in (channels, width if own else 0)
    )
    some = lambda x: a if x is None else x  # noqa: E731  a pointer that is not followed
    _few_gradients[(batch * heads * tiles * runs,)](
        a, b, c, e, some(y), some(mask), some(there), lse, some(delta), dc, de,
        batch * heads, heads, many, few, run, float(scale), *a.stride()[:3], *b.stride()[:3],
        D=channels, DP=padded(channels), E=width, EP=padded(width), OWN=own,
        MANY_MASKED=mask is not None, FEW_MASKED=there is not None, EVEN=few % size == 0,
        PRECISION=arithmetic(a.dtype), M=config.many, F=size, TILES=tiles, LOG2E=LOG2E,
        # Two groups of four warps would have to exchange the weights of a tile of 64 rows.
        num_warps=4 if max(size, channels, width) <= 64 else config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
    return dc, de
