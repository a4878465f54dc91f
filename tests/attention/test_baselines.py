"""Softmax, window, strided and reformer against dense attention under their own mask."""

import math

import pytest
import torch
from cases import qkv, relative_error

import longspan


def dense(q, k, v, visible, scale=None):
    """Softmax attention with an explicit N × N mask; zeros where nothing is visible."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).nan_to_num(0)


def places(queries, keys):
    return torch.arange(queries)[:, None] - torch.arange(keys)


LENGTHS = [(1, 1), (7, 7), (64, 64), (65, 65), (40, 23), (23, 40)]


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_softmax(queries, keys):
    q, k, v = qkv(queries=queries, keys=keys, dtype=torch.float64)
    everything = torch.ones(queries, keys, dtype=torch.bool)
    assert relative_error(longspan.softmax(q, k, v), dense(q, k, v, everything)) < 1e-12
    scaled = longspan.softmax(q, k, v, scale=0.7)
    assert relative_error(scaled, dense(q, k, v, everything, 0.7)) < 1e-12


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("window", [0, 1, 5, 32, 200, 10**6])
def test_window_is_softmax_over_the_neighbours(queries, keys, window):
    q, k, v = qkv(queries=queries, keys=keys, dtype=torch.float64)
    key_mask = torch.rand(2, keys) < 0.7
    visible = (places(queries, keys).abs() <= window) & key_mask[:, None, None]
    actual = longspan.window(q, k, v, key_mask=key_mask, window=window, scale=0.4)
    assert relative_error(actual, dense(q, k, v, visible, 0.4)) < 1e-12


@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
@pytest.mark.parametrize("stride", [None, 1, 3, 8, 100])
def test_strided_is_softmax_over_neighbours_and_multiples(queries, keys, stride):
    q, k, v = qkv(queries=queries, keys=keys, dtype=torch.float64)
    key_mask = torch.rand(2, keys) < 0.7
    step = math.ceil(math.sqrt(keys)) if stride is None else stride
    apart = places(queries, keys)
    visible = ((apart.abs() <= step) | (apart % step == 0)) & key_mask[:, None, None]
    actual = longspan.strided(q, k, v, key_mask=key_mask, stride=stride)
    assert relative_error(actual, dense(q, k, v, visible)) < 1e-12


def test_strided_gradients():
    inputs = qkv(batch=1, heads=1, queries=11, channels=3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, k, v: longspan.strided(q, k, v, stride=3), inputs)


def test_window_gradients():
    inputs = qkv(batch=1, heads=1, queries=11, channels=3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, k, v: longspan.window(q, k, v, window=3), inputs)


def test_reformer_gradients():
    inputs = qkv(batch=1, heads=1, queries=11, channels=3, dtype=torch.float64, requires_grad=True)
    attend = lambda q, k, v: longspan.reformer(q, k, v, bucket_size=2, seed=0)  # noqa: E731
    assert torch.autograd.gradcheck(attend, inputs)


def test_reformer_with_one_run_is_softmax():
    q, k, v = qkv(queries=50, dtype=torch.float64)
    everything = torch.ones(50, 50, dtype=torch.bool)
    y = longspan.reformer(q, k, v, bucket_size=50, seed=0)
    assert relative_error(y, dense(q, k, v, everything)) < 1e-12


def test_reformer_finds_the_one_key_that_matters():
    """Every query has one key in its direction, at a random place: sorting brings them together."""
    _, k, v = qkv(batch=1, heads=4, queries=512, channels=32, dtype=torch.float64)
    order = torch.randperm(512)
    k = 12 * k / k.norm(dim=-1, keepdim=True)
    q, expected = k[:, :, order], v[:, :, order]
    found = {}
    for num_hashes in (1, 4):
        y = longspan.reformer(q, k, v, num_hashes=num_hashes, bucket_size=16, seed=0)
        found[num_hashes] = ((y - expected).norm(dim=-1) < 0.1).double().mean()
    # 48 of 512 keys are seen in a round: chance would find 9 %.
    assert found[1] > 0.9
    assert found[4] > 0.99


def test_reformer_rounds_add_up_as_log_sum_exp():
    """Two rounds with one seed are the two rounds of that seed, each key counted in each."""
    q, k, v = qkv(batch=1, heads=1, queries=64, dtype=torch.float64)
    everything = torch.ones(64, 64, dtype=torch.bool)
    errors = []
    for num_hashes in (1, 2, 8, 32):
        y = longspan.reformer(q, k, v, num_hashes=num_hashes, bucket_size=8, seed=1)
        errors.append(relative_error(y, dense(q, k, v, everything)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[0]


@pytest.mark.parametrize(("name", "option"), [("strided", "stride"), ("reformer", "bucket_size")])
def test_what_is_larger_than_a_sequence_costs_no_more(name, option):
    q, k, v = qkv(queries=9, keys=14, dtype=torch.float64)
    actual = getattr(longspan, name)(q, k, v, **{option: 10**6})
    assert relative_error(actual, longspan.softmax(q, k, v)) < 1e-12


@pytest.mark.filterwarnings("ignore:remat_using_tags")  # of torch 2.10, where no gradient is asked
def test_strided_compiles_whole_for_many_lengths():
    compiled = torch.compile(longspan.strided, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (50, 60, 1, 65):
        q, k, v = qkv(queries=tokens)
        torch.testing.assert_close(compiled(q, k, v), longspan.strided(q, k, v))
