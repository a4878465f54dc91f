"""No N × N tensor is ever made, nor an N × m one: both passes, every method."""

import pytest
import torch
from cases import contract, function, qkv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan.attention.base import CHUNK

N = 8192
# softmax and the reference of the expectation take N² time, but memory they do not.
NARROW = dict(batch=1, heads=1, queries=N, channels=8)


class Largest(TorchDispatchMode):
    """Remembers the most elements that any result of any operation had."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                # The storage, not the shape: an expanded view of a row is no matrix.
                size = x.untyped_storage().nbytes() // x.element_size()
                self.elements = max(self.elements, size)
        return result


def largest(attend, **options):
    q, k, v = qkv(**NARROW, requires_grad=True)
    with Largest() as mode:
        y = attend(q, k, v, **options)
        y.backward(torch.ones_like(y))
    return mode.elements


def test_the_measure_sees_a_full_matrix():
    naive = lambda q, k, v: (q @ k.mT).softmax(-1) @ v  # noqa: E731
    assert largest(naive) == N * N


@pytest.mark.parametrize(("method", "impl", "device"), [c for c in contract() if not c.marks])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_no_full_matrix(method, impl, device, masked):
    # The window's block mask has three windows a token, strided attention √N: far below N.
    options = {"yoso": dict(hash_bits=8), "strided": dict(stride=None)}.get(method, {})
    attend = function(method, impl, keys=N, **options)
    mask = {"key_mask": torch.arange(N)[None] < N - 99} if masked else {}
    assert largest(attend, **mask) <= max(2 * CHUNK, 64 * N)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_nystrom_makes_no_matrix_of_tokens_by_landmarks(masked):
    m = 512
    attend = function("nystrom", "reference", keys=N, num_landmarks=m)
    mask = {"key_mask": torch.arange(N)[None] < N - 99} if masked else {}
    # Landmarks by landmarks is allowed, tokens by channels too.
    assert largest(attend, **mask) <= max(m * m, 4 * N * 8) < N * m / 8


def test_true_gradient_of_the_sampler():
    attend = function("yoso", "reference", keys=N, num_hashes=2, gradient="true")
    assert largest(attend) <= 2 * CHUNK < N * N / 8


def test_many_buckets_take_no_more_than_tokens():
    """2^16 buckets a hash at 8192 tokens: tables follow the tokens."""
    attend = function("yoso", "reference", keys=N, num_hashes=4, hash_bits=16)
    assert largest(attend) <= 2 * CHUNK < 4 * 2**16 * 64
