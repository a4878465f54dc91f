"""Attention between many rows and few: both directions, both passes, every configuration."""

import pytest
import torch

pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")

from longspan.attention import few, few_backward
from longspan.attention.tiles import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"


def tensors(many, small, channels=16, width=24, dtype=torch.float32, batch=2):
    """a, b, c, e and two masks: some of the many hidden, one of the few not there."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    a, b, c, e = (
        draw(batch, 2, n, d).to(DEVICE, dtype)
        for n, d in ((many, channels), (many, width), (small, channels), (small, width))
    )
    mask = torch.rand(batch, many, generator=generator) < 0.7
    mask[:, 0] = True
    there = torch.ones(batch, small, dtype=torch.bool)
    there[-1, small // 2] = small == 1
    return a, b, c, e, mask.to(DEVICE), there.to(DEVICE)


def softmax(q, k, v, visible, scale, g):
    """Output and gradients in float64."""
    q, k, v = (x.double().detach().requires_grad_() for x in (q, k, v))
    scores = (q @ k.mT * scale).masked_fill(~visible[:, None, None], -torch.inf)
    y = scores.softmax(-1) @ v
    return [y.detach(), *torch.autograd.grad(y, (q, k, v), g.double())]


def check(names, actual, expected, tolerance):
    for name, x, y in zip(names, actual, expected, strict=True):
        # With one key alone dq and dk are zero: a difference of numbers as large as the output.
        error = (x.double() - y).norm()
        assert error <= tolerance * max(y.norm(), expected[0].norm() / 4), (name, error)


def run_few(a, b, c, e, there, tolerance, config=None, **configs):
    """`read_few`: a queries, c keys, e values, b the gradient."""
    y, lse = few.read_few(a, c, e, there, 0.3, config)
    options = dict(y=y, there=there)
    da, _ = few_backward.many_gradients(a, b, c, e, lse, 0.3, **options, config=configs.get("many"))
    dc, de = few_backward.few_gradients(a, b, c, e, lse, 0.3, **options, config=configs.get("few"))
    shown = (
        torch.ones(c.shape[0], c.shape[2], dtype=torch.bool, device=DEVICE)
        if there is None
        else there
    )
    expected = softmax(a, c, e, shown, 0.3, b)
    check(("y", "dq", "dk", "dv"), (y, da, dc.sum(0), de.sum(0)), expected, tolerance)


def run_many(a, b, c, e, mask, tolerance, config=None, **configs):
    """`read_many`: c queries, a keys, b values, e the gradient."""
    if mask is not None:
        hidden = ~mask[:, None, :, None]
        a, b = a.masked_fill(hidden, torch.nan), b.masked_fill(hidden, torch.nan)
    y, lse = few.read_many(a, b, c, mask, 0.3, config)
    options = dict(delta=(y * e.float()).sum(-1), mask=mask)
    da, db = few_backward.many_gradients(
        a, b, c, e, lse, 0.3, **options, config=configs.get("many")
    )
    dc, _ = few_backward.few_gradients(a, b, c, e, lse, 0.3, **options, config=configs.get("few"))
    shown = torch.ones(a.shape[0], a.shape[2], dtype=torch.bool, device=DEVICE)
    shown = shown if mask is None else mask
    expected = softmax(c, a.nan_to_num(), b.nan_to_num(), shown, 0.3, e)
    check(("y", "dq", "dk", "dv"), (y, dc.sum(0), da, db), expected, tolerance)


@pytest.mark.parametrize(("many", "small"), [(50, 6), (33, 40), (1, 1)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_both_directions_are_softmax(many, small, masked, monkeypatch):
    a, b, c, e, mask, there = tensors(many, small)
    run_few(a, b, c, e, there if masked else None, 1e-5)
    run_many(a, b, c, e, mask if masked else None, 1e-5)


def test_runs_are_merged(monkeypatch):
    """Several runs of the many, the last one short."""
    monkeypatch.setattr(few, "_run", lambda many, others, step: 2 * step)
    monkeypatch.setattr(few_backward, "_run", lambda many, others, step: 2 * step)
    a, b, c, e, mask, there = tensors(150, 9)
    mask[0, :70] = False  # a run with nothing to see
    run_few(a, b, c, e, there, 1e-5)
    run_many(a, b, c, e, mask, 1e-5)


def test_nothing_to_see_gives_zeros():
    a, b, c, e, mask, there = tensors(20, 5)
    mask[0], there[0] = False, False
    for y, lse in (few.read_few(a, c, e, there, 0.3), few.read_many(a, b, c, mask, 0.3)):
        assert (y[0] == 0).all()
        assert y[1].isfinite().all()
        assert (lse[0] == torch.inf).all()
    y, lse = few.read_few(a, c, e, there, 0.3)
    da, _ = few_backward.many_gradients(a, b, c, e, lse, 0.3, y=y, there=there)
    dc, de = few_backward.few_gradients(a, b, c, e, lse, 0.3, y=y, there=there)
    assert all((x[0] == 0).all() for x in (da, dc.sum(0), de.sum(0)))


@pytest.mark.parametrize("given", [False, True], ids=["even", "given"])
def test_tables_are_added_by_segment(given):
    a, b, c, e, mask, _ = tensors(23, 5)
    y, lse = few.read_many(a, b, c, mask, 0.3)
    options = dict(delta=(y * e).sum(-1), mask=mask)
    tables = torch.randn_like(c), torch.randn_like(e)
    segment = torch.arange(23, device=DEVICE).expand(2, -1) * 5 // 23
    if given:
        segment = (segment + 1) % 5
        segment = segment.masked_fill(~mask, -1)
        options["segment"] = segment.int().contiguous()
    plain = few_backward.many_gradients(a, b, c, e, lse, 0.3, **{**options, "segment": None})
    added = few_backward.many_gradients(a, b, c, e, lse, 0.3, tables=tables, **options)
    index = segment.clamp(min=0)[:, None, :, None].expand(-1, 2, -1, -1)
    for table, before, after in zip(tables, plain, added, strict=True):
        rows = table.gather(2, index.expand(-1, -1, -1, table.shape[3]))
        hidden = ~mask[:, None, :, None]
        rows = rows.masked_fill(hidden, 0) if given or table is tables[1] else rows
        torch.testing.assert_close(after, before + rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("key", few.CONFIGS, ids=lambda key: "-".join(map(str, key)))
def test_every_configuration(key):
    verb, size, channels = key
    config = few.CONFIGS[key]
    dtype = torch.float32 if INTERPRETED or size == 4 else torch.bfloat16
    many = config.many + 5 if INTERPRETED else 5 * config.many + 5
    a, b, c, e, mask, there = tensors(many, config.few + 5, channels, channels, dtype, batch=1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    own = {"read_few": "config", "read_many": "config", "many_gradients": "many"}.get(verb, "few")
    if verb != "read_many":
        run_few(a, b, c, e, there, tolerance, **{own: config})
    if verb != "read_few":
        run_many(a, b, c, e, mask, tolerance, **{own: config})
