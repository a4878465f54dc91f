"""LSH-sorted attention (Reformer, Kitaev et al. 2020), for separate queries and keys."""

import torch
from torch import Tensor

from longspan.attention import checks
from longspan.attention.base import hide, in_chunks, merge, own_precision, partial, per_chunk
from longspan.attention.module import SeededAttention
from longspan.attention.random import Seed, draw_seed, gaussian

DIRECTIONS = 16  # of each of two angular hashes: (2 · 16)² buckets, at any length


@own_precision
def reformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    num_hashes: int = 2,
    bucket_size: int = 64,
    seed: Seed | None = None,
) -> Tensor:
    """Softmax attention among tokens that an angular hash sorts close together: O(N log N).

    Each round draws rotations, hashes a vector x to argmax([xR, −xR]), sorts queries and keys by
    their hash and lets each run of `bucket_size` queries see the keys at the same place of
    their order and one run either side. Rounds are joined by their log-sum-exps; a key found
    in several rounds counts in each.

    Where Nq = Nk the two are taken for one sequence: masked places do not shift the order of
    the queries.

    Args:
        q: queries (B, H, Nq, D).
        k: keys (B, H, Nk, D).
        v: values (B, H, Nk, Dv).
        key_mask: boolean (B, Nk), true = attend.
        num_hashes: rounds.
        bucket_size: queries of a run.
        seed: of the rotations; None draws one from torch's default generator.

    Returns:
        (B, H, Nq, Dv) in the dtype of v.
    """
    checks.qkv(q, k, v)
    checks.key_mask(key_mask, k)
    checks.integer("num_hashes", num_hashes, 1)
    checks.integer("bucket_size", bucket_size, 1)
    checks.seed(seed)
    dtype, device = v.dtype, q.device
    batch, heads, queries, channels = q.shape
    keys = k.shape[2]
    bucket_size = min(bucket_size, max(queries, keys))
    wide = torch.promote_types(dtype, torch.float32)
    query_mask = key_mask if queries == keys else None
    q, k, v = q.to(wide), hide(k, key_mask).to(wide), hide(v, key_mask).to(wide)
    seed = draw_seed(device) if seed is None else seed
    rotations = gaussian(seed, (num_hashes, 2, heads, channels, DIRECTIONS), device).to(wide)
    num_queries = _lengths(query_mask, batch, queries, device)
    num_keys = _lengths(key_mask, batch, keys, device)
    # Run r of the sorted queries looks at the sorted keys around the same relative place.
    runs = -(-queries // bucket_size)
    start = torch.arange(runs, device=device) * bucket_size * num_keys // num_queries.clamp(min=1)
    place = start[..., None] + torch.arange(-bucket_size, 2 * bucket_size, device=device)
    visible = (place >= 0) & (place < num_keys[..., None])  # (B, runs, 3 bucket_size)
    place = place.clamp(0, keys - 1).flatten(1)[:, None].expand(-1, heads, -1)
    visible = visible[:, None, :, None].expand(-1, heads, -1, -1, -1).flatten(0, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        return partial(q, k, v, visible, channels**-0.5)

    rounds = []
    for rotation in rotations:
        q_order = _sort(q, rotation, query_mask)
        k_order = _sort(k, rotation, key_mask).gather(2, place)
        tail = q_order[..., -1:].expand(-1, -1, runs * bucket_size - queries)
        sorted_q = _take(q, torch.cat([q_order, tail], -1)).unflatten(2, (runs, bucket_size))
        around = [_take(x, k_order).unflatten(2, (runs, -1)).flatten(0, 2) for x in (k, v)]
        rows = per_chunk(3 * bucket_size**2)
        result = in_chunks(attend, rows, sorted_q.flatten(0, 2), *around, visible)
        back = q_order.argsort(-1)
        y, total = (_take(x.unflatten(0, (batch, heads, runs)).flatten(2, 3), back) for x in result)
        rounds.append((y, total))
    return merge(rounds).to(dtype)


def _lengths(mask: Tensor | None, batch: int, tokens: int, device: torch.device) -> Tensor:
    """Valid tokens of each sequence (B, 1)."""
    if mask is None:
        return torch.full((batch, 1), tokens, device=device)
    return mask.sum(-1, keepdim=True)


def _sort(x: Tensor, rotation: Tensor, mask: Tensor | None) -> Tensor:
    """The order of tokens by bucket, masked ones last: (B, H, N)."""
    coarse, fine = (torch.cat([y, -y], -1).argmax(-1) for y in (x @ rotation[0], x @ rotation[1]))
    bucket = coarse * 2 * DIRECTIONS + fine
    if mask is not None:
        bucket = bucket.masked_fill(~mask[:, None], (2 * DIRECTIONS) ** 2)
    return bucket.argsort(dim=-1, stable=True)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x (B, H, N, D) in the given order (B, H, n)."""
    return x.gather(2, order[..., None].expand(-1, -1, -1, x.shape[-1]))


class ReformerAttention(SeededAttention):
    """`reformer` as a module: fresh rotations in training, fixed ones in eval."""

    function = staticmethod(reformer)
