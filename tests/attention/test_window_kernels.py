"""The fused window attention: interpreted anywhere, held to the reference on a GPU."""

import pytest
import torch
from cases import held_to_the_reference, qkv

import longspan
from longspan.attention.window import reference

pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")

from longspan.attention.tiles import INTERPRETED
from longspan.attention.window import triton as verbs

DEVICE = "cpu" if INTERPRETED else "cuda"


def check(q, k, v, mask, window, tolerance, forward=None, backward=None):
    """Both passes against the reference in float64; what is masked is NaN."""
    g = torch.randn(*q.shape[:3], v.shape[3], device=DEVICE).to(v.dtype)
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    exact = reference.window(*leaves, mask, window, 0.3)
    expected = [exact, *torch.autograd.grad(exact, leaves, g.double())]
    if mask is not None:
        k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    y, lse = verbs.attend(q, k, v, mask, window, 0.3, forward)
    grads = verbs.gradients(g, q, k, v, mask, y, lse, window, 0.3, backward)
    for name, a, b in zip(("y", "dq", "dk", "dv"), (y, *grads), expected, strict=True):
        # A query that sees one key alone has no gradient, up to rounding of numbers like y's.
        error = (a.double() - b).norm()
        assert error <= tolerance * max(b.norm(), exact.norm() / 4), (name, error)


SHAPES = {
    "plain": dict(queries=75),
    "more-keys": dict(queries=23, keys=61, value_channels=24),
    "more-queries": dict(queries=70, keys=23, channels=24),
    "one": dict(queries=1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("window", [0, 9, 1000])
def test_both_passes_are_those_of_the_reference(shape, masked, window):
    q, k, v = qkv(batch=2, heads=1, **shape, device=DEVICE)
    mask = None
    if masked:
        mask = torch.rand(2, k.shape[2], device=DEVICE) < 0.6
        mask[0, : k.shape[2] // 2] = False  # windows with nothing to see
    check(q, k, v, mask, window, 1e-5)


@pytest.mark.parametrize("key", verbs.CONFIGS, ids=lambda key: "-".join(map(str, key)))
def test_every_configuration(key):
    verb, size, channels = key
    config = verbs.CONFIGS[key]
    dtype = torch.float32 if INTERPRETED or size == 4 else torch.bfloat16
    length = 45 if INTERPRETED else 3 * max(config.queries, config.keys) + 5
    q, k, v = qkv(batch=1, heads=1, queries=length, channels=channels, dtype=dtype, device=DEVICE)
    chosen = {name: verbs.choose(name, dtype, channels) for name in ("forward", "queries", "keys")}
    chosen[verb] = config
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    check(q, k, v, None, 20, tolerance, chosen["forward"], (chosen["queries"], chosen["keys"]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "window"),
    [
        (dict(queries=300, channels=64), 20),
        (dict(queries=2050, channels=64), 128),
        (dict(queries=130, keys=513, channels=17, value_channels=40), 33),
        (dict(queries=700, channels=128), 100),
        (dict(queries=400, channels=256), 64),
        (dict(queries=500, channels=64), 10_000),
    ],
    ids=["plain", "long", "cross-odd", "wide", "widest", "all"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_at_most_twice_as_wrong_as_the_reference(case, window, masked, dtype):
    held_to_the_reference(longspan.window, case, masked, dtype, window=window)
