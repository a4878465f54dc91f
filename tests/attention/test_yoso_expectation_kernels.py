"""The fused expectation of YOSO: interpreted anywhere, held to the reference on a GPU."""

import math

import pytest
import torch
from cases import held_to_the_reference, qkv, relative_error

import longspan
from longspan.attention.base import unit
from longspan.attention.yoso import reference


@pytest.fixture
def verbs():
    """The Triton verbs, in the interpreter where there is no GPU."""
    pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")
    from longspan.attention.yoso import expectation_triton

    return expectation_triton


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


SHAPES = {
    "plain": dict(batch=2, heads=2, queries=40, channels=16),
    "cross-odd": dict(batch=1, heads=2, queries=21, keys=45, channels=24, value_channels=40),
    "one": dict(batch=1, heads=1, queries=1, keys=1, channels=7, value_channels=3),
}


def both(verbs, q, k, v, g, bits, true, normalize, **configs):
    """Output and gradients of the verbs, called as the ops call them."""
    forward = {"config": configs["forward"]} if configs else {}
    y, inverse = verbs.sum_values(q, verbs.unit_rows(k), v, bits, normalize, "ieee", **forward)
    backward = {"configs": configs["backward"]} if configs else {}
    grads = verbs.gradients(g, q, k, v, y, inverse, bits, true, normalize, "ieee", **backward)
    return [y, *grads]


def expected(q, k, v, g, bits, gradient, normalize):
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    y = reference.yoso_expectation(*leaves, None, bits, gradient, normalize)
    return [y, *torch.autograd.grad(y, leaves, g.double())]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("gradient", ["surrogate", "true"])
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "sum"])
@pytest.mark.parametrize("bits", [8, 5])
def test_both_passes_are_those_of_the_reference(verbs, device, shape, gradient, normalize, bits):
    q, k, v = qkv(**shape, device=device)
    g = torch.randn(*q.shape[:3], v.shape[3], device=device)
    actual = both(verbs, q, k, v, g, bits, gradient == "true", normalize)
    exact = expected(q, k, v, g, bits, gradient, normalize)
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, exact, strict=True):
        # A lone key's dq and dk are differences of equal numbers once the output is normalised.
        floor = 1e-5 * bits if shape["queries"] == 1 and normalize else 0
        error = (a.double() - b).norm()
        assert error < 1e-5 * b.norm() + floor, (name, error)


@pytest.mark.parametrize("bits", range(1, 17))
def test_every_power(verbs, device, bits):
    q, k, v = qkv(batch=1, heads=1, queries=9, keys=17, device=device)
    y, *_ = verbs.sum_values(q, verbs.unit_rows(k), v, bits, False, "ieee")
    p = reference.collision_probability(unit(q.double()) @ unit(k.double()).mT, bits)
    assert relative_error(y, p @ v.double()) < 2e-6 * bits  # each factor p is rounded


@pytest.mark.parametrize("bits", [8, 16])
def test_float16_holds_small_probabilities(verbs, device, bits):
    """2^-16 is below float16's normal numbers."""
    q, k, v = qkv(batch=1, heads=1, queries=9, keys=40, dtype=torch.float16, device=device)
    y, *_ = verbs.sum_values(q, verbs.unit_rows(k), v, bits, True, "ieee")
    exact, *_ = expected(q, k, v, torch.zeros_like(v[:, :, :9]), bits, "surrogate", True)
    assert relative_error(y, exact) < 1e-3  # float16 rounds to 5e-4


def test_parallel_and_opposite_keys(verbs, device):
    """At cosines of ±1 and a little past them, no NaN, and p is 1 and 0."""
    q, _, v = qkv(batch=1, heads=1, queries=16, channels=32, device=device)
    for sign, p in ((1, 1.0), (-1, 0.0)):
        for true in (False, True):
            k = sign * 3 * q[:, :, :1].expand(-1, -1, 16, -1).contiguous()
            y, *grads = both(verbs, q[:, :, :1], k, v, v[:, :, :1], 8, true, False)
            # √ turns a rounding of 1e-7 in the cosine into 4e-4 in the angle, times 8.
            torch.testing.assert_close(y, p * v.sum(2, True), rtol=0, atol=16 * 1e-2)
            assert all(x.isfinite().all() for x in grads)


def configurations(verb):
    from longspan.attention.yoso.expectation_triton import CONFIGS

    return [pytest.param(key, id="-".join(map(str, key))) for key in CONFIGS if key[0] == verb]


@pytest.mark.parametrize("key", configurations("forward"))
def test_every_configuration_of_the_forward(verbs, device, key):
    held_to_configuration(verbs, device, key)


@pytest.mark.parametrize("key", configurations("queries") + configurations("keys"))
def test_every_configuration_of_the_backward(verbs, device, key):
    held_to_configuration(verbs, device, key)


def held_to_configuration(verbs, device, key):
    """A configuration at the width and element size it is meant for, on more than one tile."""
    verb, size, channels = key
    dtype = torch.float32 if size == 4 or device == "cpu" else torch.bfloat16
    config = verbs.CONFIGS[key]
    length = 37 if device == "cpu" else 2 * max(config.queries, config.keys) + 37
    q, k, v = qkv(batch=1, heads=2, queries=length, channels=channels, dtype=dtype, device=device)
    g = torch.randn_like(v)
    chosen = {name: verbs.choose(name, dtype, channels) for name in ("forward", "queries", "keys")}
    chosen[verb] = config
    backward = chosen["queries"], chosen["keys"]
    actual = both(verbs, q, k, v, g, 8, False, True, forward=chosen["forward"], backward=backward)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(actual, expected(q, k, v, g, 8, "surrogate", True), strict=True):
        assert relative_error(a, b) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        dict(queries=300, channels=64),
        dict(queries=130, keys=513, channels=17, value_channels=40),
        dict(queries=2050, channels=64),
        dict(queries=257, channels=128, value_channels=96),
        dict(queries=257, channels=256),
        dict(queries=700, channels=16),
    ],
    ids=["plain", "cross-odd", "long", "wide", "widest", "narrow"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("gradient", ["surrogate", "true"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_at_most_twice_as_wrong_as_the_reference(case, masked, gradient, dtype):
    def floor(name, exact):
        # As in the sampler's test: g·v is rounded before τ/2 multiplies it.
        slack = torch.finfo(dtype).eps * 4 * exact["dv"].norm()
        return slack if name in ("dq", "dk") else 0

    held_to_the_reference(
        longspan.yoso_expectation, case, masked, dtype, floor, hash_bits=8, gradient=gradient
    )


@pytest.mark.gpu
def test_fused_refuses_what_it_cannot_do():
    q, k, v = qkv(device="cuda", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"no fused kernel for torch.float64"):
        longspan.yoso_expectation(q, k, v, impl="fused")
    wide = torch.randn(1, 1, 9, 300, device="cuda")
    with pytest.raises(NotImplementedError, match=r"for more than 256 channels"):
        longspan.yoso_expectation(wide, wide, wide, impl="fused")


def test_the_polynomials_are_as_close_as_they_say(verbs):
    """p² = (1 − u) R(u) against arccos in float64, at the coefficients of the source."""
    import inspect
    import re

    source = inspect.getsource(verbs._probability.fn)
    numbers = [float(x.replace(" ", "")) for x in re.findall(r"[-+]? ?0\.\d{6,}", source)]
    u = torch.linspace(0, 1, 10001, dtype=torch.float64)[:-1]
    exact = (2 / math.pi * u.acos()) ** 2 / (1 - u)
    for degree, error in ((3, 1.2e-4), (5, 2.1e-6), (8, 7e-9)):
        coefficients, numbers = numbers[: degree + 1], numbers[degree + 1 :]
        r = torch.zeros_like(u)
        for c in coefficients:
            r = r * u + c
        assert ((r / exact) - 1).abs().max() < error, degree
