"""What only Nyström attention has: landmarks, the iteration, its limits."""

import math
from itertools import pairwise

import pytest
import torch
from cases import qkv, relative_error

import longspan
from longspan.attention.nystrom.reference import pseudo_inverse


def random_softmax(rows=24, sharpness=2.0):
    return (torch.randn(2, 3, rows, rows, dtype=torch.float64) * sharpness).softmax(-1)


def test_the_iteration_is_the_spectral_filter_of_its_closed_form():
    """With e = 1 − σ²/norm, a step maps e to (3e³ + e⁴)/4 in every singular direction of A."""
    a = random_softmax()
    u, sigma, vt = torch.linalg.svd(a)
    norm = a.sum(-2).amax(-1) * a.sum(-1).amax(-1)
    e = 1 - sigma.square() / norm[..., None]
    for iterations in range(1, 9):
        e = (3 * e**3 + e**4) / 4
        expected = vt.mT @ torch.diag_embed((1 - e) / sigma) @ u.mT
        assert relative_error(pseudo_inverse(a, iterations, "exact"), expected) < 1e-10


def test_the_residual_falls_with_every_iteration():
    a = random_softmax()
    residuals = [
        (torch.eye(24) - a @ pseudo_inverse(a, n, "exact")).norm().item() for n in range(1, 20)
    ]
    # Past 1e-9 it is rounding that moves.
    assert all(later < earlier or later < 1e-9 for earlier, later in pairwise(residuals))
    assert residuals[-1] < 1e-9


def test_a_landmark_for_every_token_is_exact():
    q, k, v = qkv(queries=24, dtype=torch.float64)
    expected = longspan.softmax(q, k, v)
    for num_landmarks in (24, 25, 100):
        y = longspan.nystrom(q, k, v, num_landmarks=num_landmarks)
        assert relative_error(y, expected) < 1e-12


def test_short_sequences_of_a_batch_are_exact():
    q, k, v = qkv(queries=60, dtype=torch.float64)
    key_mask = torch.arange(60) < torch.tensor([[60], [17]])
    y = longspan.nystrom(q, k, v, key_mask=key_mask, num_landmarks=17)
    expected = longspan.softmax(q, k, v, key_mask=key_mask)
    assert relative_error(y[1], expected[1]) < 1e-12
    assert relative_error(y[0], expected[0]) > 1e-3


def test_a_converged_inverse_of_unit_segments_is_softmax():
    """S · S⁺ · S = S, through the iteration itself rather than the exact branch."""
    scores = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    s = scores.softmax(-1)
    assert relative_error(s @ pseudo_inverse(s, 25, "exact") @ s, s) < 1e-9
    assert relative_error(s @ pseudo_inverse(s, 3, "exact") @ s, s) > 1e-3


def test_one_landmark_gives_every_query_the_mean_querys_answer():
    q, k, v = qkv(queries=30, dtype=torch.float64)
    y = longspan.nystrom(q, k, v, num_landmarks=1)
    expected = longspan.softmax(q.mean(2, keepdim=True), k, v).expand_as(v)
    assert relative_error(y, expected) < 1e-12


@pytest.mark.parametrize("tokens", range(12, 24))
def test_uneven_segments_match_the_formula(tokens):
    m = 6
    q, k, v = qkv(queries=tokens, dtype=torch.float64)
    group = torch.tensor([math.floor(i * m / tokens) for i in range(tokens)])
    mean = torch.nn.functional.one_hot(group, m).double()
    mean = (mean / mean.sum(0)).T
    q_means, k_means = mean @ q, mean @ k
    f, a, b = (
        (x @ y.mT / 4).softmax(-1) for x, y in ((q, k_means), (q_means, k_means), (q_means, k))
    )
    for init in ("exact", "original"):
        norm = a.sum(-2).amax(-1)[..., None, None]
        z = a.mT / (norm.amax() if init == "original" else norm)
        eye = torch.eye(m, dtype=torch.float64)
        for _ in range(6):
            z = 0.25 * z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z)))
        actual = longspan.nystrom(q, k, v, num_landmarks=m, init=init)
        assert relative_error(actual, f @ z @ b @ v) < 1e-10, init


def test_the_original_init_makes_samples_depend_on_each_other():
    """Why it is not the default: the divisor is the largest in the batch."""
    q, k, v = qkv(dtype=torch.float64)
    loud = torch.cat([q[:1], 20 * q[1:]]), torch.cat([k[:1], 20 * k[1:]]), v
    change = {
        init: relative_error(
            longspan.nystrom(*loud, num_landmarks=8, init=init)[0],
            longspan.nystrom(q, k, v, num_landmarks=8, init=init)[0],
        )
        for init in ("exact", "original")
    }
    assert change["exact"] < 1e-12
    assert change["original"] > 1e-6


def test_constant_keys_are_no_trouble():
    """A is of rank one; its pseudo-inverse is not its inverse."""
    q, k, v = qkv(queries=50, dtype=torch.float32)
    k = k[:, :, :1].expand_as(k).contiguous().requires_grad_()
    y = longspan.nystrom(q, k, v, num_landmarks=8)
    (grad,) = torch.autograd.grad(y.sum(), k)
    assert grad.isfinite().all()
    assert relative_error(y, v.mean(2, keepdim=True).expand_as(v)) < 1e-3


def test_rows_sum_to_one_when_converged():
    q, k, _ = qkv(queries=50, dtype=torch.float64)
    ones = torch.ones(2, 3, 50, 1, dtype=torch.float64)
    y = longspan.nystrom(q, k, ones, num_landmarks=8, num_iterations=25)
    assert relative_error(y, ones) < 1e-6


@pytest.mark.parametrize("init", ["exact", "original"])
def test_gradients(init):
    inputs = qkv(batch=2, heads=1, queries=11, channels=3, dtype=torch.float64, requires_grad=True)
    key_mask = torch.arange(11) < torch.tensor([[11], [8]])
    attend = lambda q, k, v: longspan.nystrom(  # noqa: E731
        q, k, v, key_mask=key_mask, num_landmarks=4, init=init
    )
    assert torch.autograd.gradcheck(attend, inputs)
