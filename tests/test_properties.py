"""Any shape, any mask: properties that hypothesis searches for a counter-example."""

import pytest
import torch
from cases import contract, function, precise, relative_error

hypothesis = pytest.importorskip("hypothesis", reason="needs hypothesis, from the extra [dev]")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

CASES = [c for c in contract() if not c.marks]
SETTINGS = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@st.composite
def problems(draw):
    """q, k, v and a mask of any shape; k and v hold NaN where the mask hides them."""
    batch, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, keys = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    if draw(st.booleans()):
        keys = queries
    channels, value_channels = (
        draw(st.sampled_from([1, 3, 8, 17])),
        draw(st.sampled_from([1, 4, 17])),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = (queries, channels), (keys, channels), (keys, value_channels)
    q, k, v = (
        torch.randn(batch, heads, *size, generator=generator, dtype=torch.float64) for size in sizes
    )
    share = draw(st.sampled_from([0.0, 0.2, 0.9, 1.0]))
    key_mask = torch.rand(batch, keys, generator=generator) < share
    hidden = ~key_mask[:, None, :, None]
    return q, k, v, k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan), key_mask


@pytest.mark.parametrize(("method", "impl", "device"), CASES)
@SETTINGS
@given(problem=problems())
def test_masked_contents_never_reach_output_or_gradient(method, impl, device, problem):
    *tensors, key_mask = problem
    q, k, v, nan_k, nan_v = (x.to(precise(impl)[0]) for x in tensors)
    attend = function(method, impl, keys=k.shape[2])
    results = []
    for keys, values in ((k, v), (nan_k, nan_v)):
        leaves = [x.clone().requires_grad_() for x in (q, keys, values)]
        y = attend(*leaves, key_mask=key_mask)
        y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).view_as(y))
        results.append([y.detach(), *(x.grad for x in leaves)])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)
        assert clean.isfinite().all()
    blind = ~key_mask.any(-1)
    assert all((x[blind] == 0).all() for x in results[0])


@pytest.mark.parametrize(("method", "impl", "device"), CASES)
@SETTINGS
@given(problem=problems())
def test_output_is_linear_in_the_values(method, impl, device, problem):
    """Every method weighs values by what queries and keys say (YOSO before its normalisation)."""
    dtype, rounding = precise(impl)
    q, k, v = (x.to(dtype) for x in problem[:3])
    key_mask = problem[-1]
    options = {"normalize": False} if method.startswith("yoso") else {}
    attend = function(method, impl, keys=k.shape[2], **options)
    y, z = (attend(q, k, x, key_mask=key_mask) for x in (v, v.flip(1)))
    both = attend(q, k, 2 * v - 3 * v.flip(1), key_mask=key_mask)
    if y.abs().sum() > 0:
        assert relative_error(both, 2 * y - 3 * z) < rounding


@pytest.mark.parametrize(("method", "impl", "device"), CASES)
@SETTINGS
@given(problem=problems())
def test_batch_entries_do_not_meet(method, impl, device, problem):
    dtype, rounding = precise(impl)
    q, k, v = (x.to(dtype) for x in problem[:3])
    key_mask = problem[-1]
    attend = function(method, impl, keys=k.shape[2])
    whole = attend(q, k, v, key_mask=key_mask)
    for i in range(q.shape[0]):
        part = attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], key_mask=key_mask[i : i + 1])
        torch.testing.assert_close(whole[i : i + 1], part, rtol=rounding, atol=rounding / 1000)
