"""The fused Linformer: interpreted anywhere, held to the reference on a GPU."""

import pytest
import torch
from cases import held_to_the_reference, qkv, relative_error

import longspan
from longspan.attention.linformer import kernels, reference

pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")

from longspan.attention.linformer import triton as verbs
from longspan.attention.tiles import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"


def projections(rows, keys, heads=None, dtype=torch.float32):
    """E and F, (k, N) or one a head, as columns of a longer matrix: rows of another stride."""
    shape = (2, rows, keys + 3) if heads is None else (2, heads, rows, keys + 3)
    return (torch.randn(shape) / keys**0.5).to(DEVICE, dtype)[..., :keys]


def masks(batch, keys):
    mask = torch.rand(batch, keys) < 0.7
    mask[0, keys // 2 :] = False
    return mask.to(DEVICE)


SHAPES = {
    "plain": dict(queries=40, rows=7),
    "cross-odd": dict(queries=21, keys=45, channels=24, value_channels=40, rows=5),
    "more-than-a-tile": dict(queries=20, keys=50, rows=35),
    "one": dict(queries=1, rows=1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "by-head"])
def test_both_passes_are_those_of_the_reference(shape, masked, shared):
    shape = dict(shape)
    rows = shape.pop("rows")
    q, k, v = qkv(batch=2, heads=2, **shape, device=DEVICE)
    e, f = projections(rows, k.shape[2], None if shared else 2)
    mask = masks(2, k.shape[2]) if masked else None
    g = torch.randn(*q.shape[:3], v.shape[3], device=DEVICE)
    poison = [k, v]
    if masked:
        poison = [x.masked_fill(~mask[:, None, :, None], torch.nan) for x in poison]
    y, *saved = kernels.linformer_forward(q, *poison, e, f, mask, 0.3)
    grads = kernels.linformer_backward(g, q, *poison, e, f, mask, y, *saved, 0.3, True)
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v, e, f)]
    exact = reference.linformer(*leaves, mask, 0.3)
    expected = [exact, *torch.autograd.grad(exact, leaves, g.double())]
    names = "y", "dq", "dk", "dv", "de", "df"
    for name, a, b in zip(names, (y, *grads), expected, strict=True):
        # With one projected key alone dq, dk and de are zero.
        error = (a.double() - b).norm()
        assert error <= 1e-5 * max(b.norm(), exact.norm() / 4), name


def test_projections_that_are_not_learned_get_no_gradient():
    q, k, v = qkv(device=DEVICE)
    e, f = projections(7, 50)
    y, *saved = kernels.linformer_forward(q, k, v, e, f, None, 0.3)
    *_, de, df = kernels.linformer_backward(y, q, k, v, e, f, None, y, *saved, 0.3, False)
    assert de.numel() == df.numel() == 0


def test_runs_are_added_up(monkeypatch):
    """Runs of tokens in `project`, runs of heads in `outer`."""
    monkeypatch.setattr(verbs, "PROGRAMS", 10**6)
    monkeypatch.setitem(verbs.CONFIGS, ("project", 4, 64), verbs.Config(16, 16, 4, 1))
    _, k, _ = qkv(batch=3, heads=3, queries=300, device=DEVICE)
    e, _ = projections(20, 300)
    mask = masks(3, 300)
    hidden = k.masked_fill(~mask[:, None, :, None], 0)
    assert relative_error(verbs.project(e, k, mask), e @ hidden) < 1e-5
    y = torch.randn(3, 3, 20, 16, device=DEVICE)
    assert (
        relative_error(verbs.outer(y, k, mask, True, y.dtype), (y @ hidden.mT).sum((0, 1))) < 1e-5
    )
    assert relative_error(verbs.outer(y, k, mask, False, y.dtype), (y @ hidden.mT).sum(0)) < 1e-5


@pytest.mark.parametrize("key", verbs.CONFIGS, ids=lambda key: "-".join(map(str, key)))
def test_every_configuration(key):
    verb, size, channels = key
    config = verbs.CONFIGS[key]
    dtype = torch.float32 if INTERPRETED or size == 4 else torch.bfloat16
    tokens, rows = config.tokens + 11, config.rows + 5
    _, x, _ = qkv(batch=1, heads=2, queries=tokens, channels=channels, dtype=dtype, device=DEVICE)
    e, _ = projections(rows, tokens, dtype=dtype)
    y = torch.randn(1, 2, rows, channels, device=DEVICE).to(dtype)
    if verb == "project":
        actual, expected = verbs.project(e, x, None, config), e.double() @ x.double()
    elif verb == "spread":
        actual, expected = verbs.spread(e, y, None, config), e.double().mT @ y.double()
    else:
        actual = verbs.outer(y, x, None, True, torch.float32, config)
        expected = (y.double() @ x.double().mT).sum((0, 1))
    assert relative_error(actual, expected) < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "rows"),
    [
        (dict(queries=300, channels=64), 256),
        (dict(queries=2050, channels=64), 256),
        (dict(queries=130, keys=513, channels=17, value_channels=40), 33),
        (dict(queries=700, channels=128), 128),
        (dict(queries=400, channels=256), 64),
        (dict(queries=1500, channels=64), 1024),
    ],
    ids=["plain", "long", "cross-odd", "wide", "widest", "1024"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "by-head"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_at_most_twice_as_wrong_as_the_reference(case, rows, masked, shared, dtype):
    e, f = projections(rows, case.get("keys", case["queries"]), None if shared else 2, dtype)
    learned = {"key_projection": e, "value_projection": f}
    held_to_the_reference(longspan.linformer, case, masked, dtype, learned=learned)
