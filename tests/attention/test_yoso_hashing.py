"""Hash codes: what they are, how often they agree."""

import math

import pytest
import torch
from cases import DEVICES, qkv

from longspan.attention.base import unit
from longspan.attention.yoso.hashing import hash_codes, projections

CPU = torch.device("cpu")


def pairs(count, channels, cosine, generator):
    """Unit vectors x, y of random direction at a given cosine: (1, 1, count, channels) each."""
    x, z = unit(torch.randn(2, count, channels, generator=generator))
    z = unit(z - (z * x).sum(-1, keepdim=True) * x)
    return x[None, None], (cosine * x + math.sqrt(1 - cosine**2) * z)[None, None]


def sparse_pairs(count, channels, cosine, generator):
    """Pairs with two non-zero channels each, where Hadamard rows are least random."""
    angle = torch.rand(count, generator=generator) * 2 * math.pi
    other = angle + math.acos(cosine)
    at = torch.rand(count, channels, generator=generator).argsort(-1)[:, :2]
    result = []
    for a in (angle, other):
        x = torch.zeros(count, channels).scatter_(1, at, torch.stack([a.cos(), a.sin()], -1))
        result.append(x[None, None])
    return result


@pytest.mark.parametrize("hash_bits", range(1, 17))
@pytest.mark.parametrize("hashing", ["gaussian", "hadamard"])
def test_codes_are_the_signs_of_the_projections(hashing, hash_bits):
    x, _, _ = qkv(queries=9, channels=24)
    planes = projections(hashing, 1, 3, 24, 5, hash_bits, CPU)
    codes = hash_codes(x, planes)
    signs = torch.einsum("bhnd,hmtd->bhmnt", x.double(), planes.double()) > 0
    assert torch.equal(codes, (signs * 2 ** torch.arange(hash_bits)).sum(-1).int())
    assert codes.max() < 2**hash_bits


def test_codes_in_chunks_are_the_same(monkeypatch):
    from longspan.attention import base

    x, _, _ = qkv(queries=50)
    planes = projections("gaussian", 1, 3, 16, 5, 8, CPU)
    whole = hash_codes(x, planes)
    monkeypatch.setattr(base, "CHUNK", 1000)
    assert torch.equal(hash_codes(x, planes), whole)


@pytest.mark.parametrize("channels", [1, 16, 48, 64])
def test_hadamard_rows_of_one_product_are_orthogonal(channels):
    width = 1 << (channels - 1).bit_length()
    planes = projections("hadamard", 1, 2, width, width, 3, CPU).transpose(1, 2)  # (H, τ, m, D)
    torch.testing.assert_close(planes @ planes.mT, torch.eye(width).expand(2, 3, -1, -1))
    assert projections("hadamard", 1, 2, channels, 100, 3, CPU).shape == (2, 100, 3, channels)


RATES = [  # channels, bits, cosine
    (64, 8, 0.0), (64, 8, 0.5), (64, 8, 0.8), (64, 8, 0.95), (64, 9, 0.5),
    (32, 10, 0.5), (32, 12, 0.5), (32, 12, 0.8), (48, 8, 0.5), (128, 8, 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("channels", "hash_bits", "cosine"), RATES)
@pytest.mark.parametrize("hashing", ["gaussian", "hadamard"])
def test_vectors_collide_as_often_as_their_angle_says(hashing, channels, hash_bits, cosine):
    rate = collision_rate(pairs, hashing, channels, hash_bits, cosine)
    # 2 % is the promise; one standard error of the test itself is 0.6 % at worst.
    assert rate == pytest.approx((1 - math.acos(cosine) / math.pi) ** hash_bits, rel=0.02)


@pytest.mark.parametrize("cosine", [0.5, 0.8])
def test_hadamard_holds_on_sparse_vectors(cosine):
    """Two of 64 channels: published layouts are off by more than two there."""
    rate = collision_rate(sparse_pairs, "hadamard", 64, 8, cosine)
    assert rate == pytest.approx((1 - math.acos(cosine) / math.pi) ** 8, rel=0.05)


def collision_rate(draw, hashing, channels, hash_bits, cosine):
    generator = torch.Generator().manual_seed(1)
    rounds = 14 if cosine < 0.3 else 5
    agree = 0.0
    for seed in range(rounds):
        x, y = draw(20_000, channels, cosine, generator)
        planes = projections(hashing, seed, 1, channels, 32, hash_bits, CPU)
        agree += (hash_codes(x, planes) == hash_codes(y, planes)).double().mean().item() / rounds
    return agree


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hashing", ["gaussian", "hadamard"])
def test_every_device_gives_the_same_codes(hashing, device):
    x, _, _ = qkv(queries=300, channels=48)
    here, there = (
        hash_codes(x.to(d), projections(hashing, 7, 3, 48, 8, 8, torch.device(d))).cpu()
        for d in ("cpu", device)
    )
    # Bits differ only where a projection is within rounding of zero: a few in a million.
    assert (here != there).double().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_query_equal_to_a_key_always_collides(dtype):
    """Projections of queries and keys are the same arithmetic, at any place and scale."""
    import longspan

    q, _, v = qkv(batch=1, heads=2, queries=64, dtype=dtype)
    order = torch.randperm(64)
    k = (4 * q[:, :, order]).to(dtype)
    # 16 bits: others hardly ever collide, so each query reads its own value.
    y = longspan.yoso(q, k, v, hash_bits=16, num_hashes=8, normalize=False, seed=1)
    expected = torch.empty_like(v)
    expected[:, :, order] = v
    share = (y.double() - expected.double()).norm() / expected.double().norm()
    assert share < 0.05
