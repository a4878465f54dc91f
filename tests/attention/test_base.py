"""The pieces that methods share."""

import math

import pytest
import torch
from cases import qkv

from longspan.attention import base


def test_unit_scales_rows_and_leaves_zero_rows_without_gradient():
    x = torch.randn(5, 7, dtype=torch.float64)
    x[2] = 0
    x.requires_grad_()
    y = base.unit(x)
    assert torch.allclose(y.norm(dim=-1), torch.tensor([1, 1, 0, 1, 1.0], dtype=torch.float64))
    (grad,) = torch.autograd.grad((y * torch.randn(5, 7)).sum(), x)
    assert (grad[2] == 0).all()
    assert torch.autograd.gradcheck(base.unit, torch.randn(4, 3).double().requires_grad_())


def test_unit_has_the_gradients_of_short_rows():
    x = (1e-15 * torch.randn(3, 4)).requires_grad_()
    exact = x.detach().double().requires_grad_()
    g = 1e-3 * torch.randn(3, 4)
    (grad,) = torch.autograd.grad(base.unit(x), x, g)
    (expected,) = torch.autograd.grad(base.unit(exact), exact, g.double())
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=0)


def test_parts_merge_into_the_softmax_over_their_union():
    q, k, v = qkv(queries=9, keys=14, dtype=torch.float64)
    visible = torch.rand(9, 14) < 0.6
    visible[3] = False
    visible[4, :6] = False
    parts = [
        base.partial(q, k[:, :, at], v[:, :, at], visible[:, at], 0.3)
        for at in (slice(0, 6), slice(6, 14))
    ]
    scores = (q @ k.mT * 0.3).masked_fill(~visible, -torch.inf)
    expected = (scores.softmax(-1) @ v).nan_to_num(0)
    assert torch.allclose(base.merge(parts), expected)
    assert (base.merge(parts)[:, :, 3] == 0).all()


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_chunks_change_neither_result_nor_gradient(rows):
    x, w = torch.randn(10, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True)
    function = lambda x: (x @ w, x.sum(-1, keepdim=True) * w.sum())  # noqa: E731
    whole, split = function(x), base.in_chunks(function, rows, x)
    for a, b in zip(whole, split, strict=True):
        assert torch.allclose(a, b)
    loss = lambda y: y[0].sin().sum() + y[1].cos().sum()  # noqa: E731
    for a, b in zip(
        torch.autograd.grad(loss(whole), (x, w)),
        torch.autograd.grad(loss(split), (x, w)),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 2, 5, 6, 7, 11, 12, 13, 29])
@pytest.mark.parametrize("segments", [1, 4, 6])
def test_segments_cover_the_valid_tokens_evenly(tokens, segments):
    x = torch.randn(2, 3, tokens + 4, 5, dtype=torch.float64)
    key_mask = torch.zeros(2, tokens + 4, dtype=torch.bool)
    key_mask[0, :tokens] = True  # padding on the right
    key_mask[1, torch.randperm(tokens + 4)[:tokens]] = True  # holes anywhere
    means, sizes = base.segment_means(base.hide(x, key_mask), key_mask, segments)
    assert (sizes.sum(-1) == tokens).all()
    assert sizes.max() - sizes.min() <= 1
    for i in range(2):
        valid = x[i][:, key_mask[i]]
        group = [math.floor(j * segments / tokens) for j in range(tokens)]
        for s in range(segments):
            members = [j for j in range(tokens) if group[j] == s]
            assert sizes[i, s] == len(members)
            expected = valid[:, members].mean(1) if members else torch.zeros(3, 5).double()
            assert torch.allclose(means[i, :, s], expected)
