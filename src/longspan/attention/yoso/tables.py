"""Sums over pairs that share a bucket, at a cost linear in the tokens.

Codes are (B, H, m, N) integers below `buckets`; every hash has a table of its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.attention.base import per_chunk


def compact(a: Tensor, b: Tensor, buckets: int) -> tuple[Tensor, Tensor, int]:
    """Renumber codes so that there are no more buckets than tokens; equal codes stay equal."""
    tokens = a.shape[-1] + b.shape[-1]
    if buckets <= tokens:
        return a, b, buckets
    codes, order = torch.cat([a, b], -1).sort(-1)
    new = F.pad(codes.diff() != 0, (1, 0)).cumsum(-1, dtype=codes.dtype)
    renumbered = torch.empty_like(new).scatter_(-1, order, new)
    return renumbered[..., : a.shape[-1]], renumbered[..., a.shape[-1] :], tokens


def bucket_sum(codes: Tensor, x: Tensor, buckets: int) -> Tensor:
    """Sum the rows of x (B, H, N, D) by bucket: (B, H, m, buckets, D)."""
    batch, heads, hashes, tokens = codes.shape
    # Sorted rows and one sum a run: faster than scattered additions, and in a fixed order.
    codes, order = codes.sort(dim=-1, stable=True)
    edges = torch.arange(buckets, device=x.device, dtype=codes.dtype)
    first = torch.searchsorted(codes, edges.expand(batch, heads, hashes, -1).contiguous())
    group = torch.arange(batch * heads * hashes, device=x.device).view(batch, heads, hashes, 1)
    first = (first + group * tokens).flatten()
    order = (order + group // hashes * tokens).flatten()
    table = F.embedding_bag(order, x.reshape(-1, x.shape[-1]), first, mode="sum")
    return table.view(batch, heads, hashes, buckets, x.shape[-1])


def bucket_gather(table: Tensor, codes: Tensor) -> Tensor:
    """Read each token's bucket in every hash and add them up: (B, H, N, D)."""
    batch, heads, hashes, tokens = codes.shape
    buckets, channels = table.shape[-2:]
    group = torch.arange(batch * heads * hashes, device=codes.device).view(batch, heads, hashes, 1)
    index = (codes + group * buckets).transpose(2, 3).reshape(-1, hashes)
    y = F.embedding_bag(index, table.view(-1, channels), mode="sum")
    return y.view(batch, heads, tokens, channels)


def pair_sums(cq: Tensor, ck: Tensor, buckets: int, v: Tensor) -> Tensor:
    """Σ_h Σ_j [cq_hi = ck_hj] v_j: fill the tables from the keys, read them by the queries."""
    batch, heads, hashes, keys = ck.shape
    step = per_chunk(batch * heads * (buckets * v.shape[-1] + 4 * keys))
    y = v.new_zeros(batch, heads, cq.shape[-1], v.shape[-1])
    for h in range(0, hashes, step):
        table = bucket_sum(ck[:, :, h : h + step], v, buckets)
        y += bucket_gather(table, cq[:, :, h : h + step])
    return y


def apply_outer_sums(
    cq: Tensor, ck: Tensor, buckets: int, k: Tensor, v: Tensor, g: Tensor
) -> Tensor:
    """Σ_h Σ_j [cq_hi = ck_hj] k_j (v_j · g_i), by a D × Dv table Σ_j k_j v_jᵀ for each bucket.

    Linear however the tokens fall: a bucket's rows are cut into short blocks, and both the sum
    over keys and the product with the queries are matrix products over blocks.
    """
    batch, heads, hashes, _ = cq.shape
    cq, ck, k, v, g = (x.flatten(0, 1) for x in (cq, ck, k, v, g))
    y = torch.zeros(batch * heads, cq.shape[-1], k.shape[-1], dtype=k.dtype, device=k.device)
    most = max(_num_blocks(x.shape[-1], buckets) for x in (cq, ck)) * k.shape[-1]
    columns = min(v.shape[-1], per_chunk(most))
    groups = per_chunk(most * columns)  # of (head, hash), worked on at once
    h_step, b_step = min(groups, hashes), max(1, groups // hashes)
    for b in range(0, batch * heads, b_step):
        at = slice(b, b + b_step)
        for h in range(0, hashes, h_step):
            codes = cq[at, h : h + h_step], ck[at, h : h + h_step]
            for c in range(0, v.shape[-1], columns):
                part = slice(c, c + columns)
                y[at] += _outer_sums(*codes, buckets, k[at], v[at, :, part], g[at, :, part])
    return y.unflatten(0, (batch, heads))


def _outer_sums(cq: Tensor, ck: Tensor, buckets: int, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """`apply_outer_sums` for codes (G, m, N) and rows (G, N, D), all at once."""
    groups, hashes, _ = cq.shape
    index, first, _, _ = _blocks(ck, buckets)
    outer = (_rows(k, index).mT @ _rows(v, index)).flatten(-2)  # (G, m, blocks, D · Dv)
    group = torch.arange(groups * hashes, device=k.device).view(groups, hashes, 1)
    table = F.embedding_bag(
        torch.arange(outer[..., 0].numel(), device=k.device),
        outer.flatten(0, 2),
        (first + group * outer.shape[2]).flatten(),
        mode="sum",
    )
    index, _, bucket, slot = _blocks(cq, buckets)
    table = table.index_select(0, (bucket + group * buckets).flatten())
    table = table.view(-1, k.shape[-1], v.shape[-1])
    y = (_rows(g, index).flatten(0, 2) @ table.mT).flatten(0, 1)  # (G · m · blocks · rows, D)
    # Every token has one row in each hash.
    slot = (slot + group * index[0, 0].numel()).transpose(1, 2).reshape(-1, hashes)
    return F.embedding_bag(slot, y, mode="sum").view(groups, cq.shape[-1], k.shape[-1])


def _blocks(codes: Tensor, buckets: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cut the rows of every bucket into blocks of equal size, the last one padded.

    For codes (G, m, N), returns the tokens of each block (G, m, blocks, rows), N where padded;
    the first block of each bucket (G, m, buckets); the bucket of each block (G, m, blocks); and
    the place of each token among all rows (G, m, N). Shapes depend on no content.
    """
    tokens = codes.shape[-1]
    rows, blocks = _block_rows(tokens, buckets), _num_blocks(tokens, buckets)
    codes, order = codes.long().sort(dim=-1, stable=True)
    count = torch.zeros(*codes.shape[:2], buckets, dtype=torch.long, device=codes.device)
    count.scatter_add_(-1, codes, torch.ones_like(codes))
    filled = (count + rows - 1) // rows
    end = filled.cumsum(-1)
    first = end - filled
    rank = torch.arange(tokens, device=codes.device) - (count.cumsum(-1) - count).gather(-1, codes)
    place = first.gather(-1, codes) * rows + rank
    index = torch.full((*codes.shape[:2], blocks * rows), tokens, device=codes.device)
    index.scatter_(-1, place, order)
    number = torch.arange(blocks, device=codes.device).expand(*codes.shape[:2], -1).contiguous()
    bucket = torch.searchsorted(end, number, right=True).clamp(max=buckets - 1)
    slot = torch.empty_like(place).scatter_(-1, order, place)
    return index.unflatten(-1, (blocks, rows)), first, bucket, slot


def _block_rows(tokens: int, buckets: int) -> int:
    """Rows of a block: near the mean load of a bucket, and 32 at least for all but light ones.

    Matrix products over fewer rows are slow, but padding a single row to 32 would be slower.
    """
    load = tokens // buckets
    return min(64, max(8 if load < 8 else 32, 1 << (load - 1).bit_length()))


def _num_blocks(tokens: int, buckets: int) -> int:
    """Blocks that always suffice: a bucket wastes less than one."""
    return tokens // _block_rows(tokens, buckets) + min(buckets, tokens)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (G, N, D) by index (G, m, blocks, rows); index N reads zeros."""
    x = F.pad(x, (0, 0, 0, 1))
    group = torch.arange(x.shape[0], device=x.device).view(-1, 1, 1, 1) * x.shape[1]
    rows = x.flatten(0, 1).index_select(0, (index + group).flatten())
    return rows.view(*index.shape, -1)
