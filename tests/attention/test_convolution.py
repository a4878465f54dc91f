"""The residual convolution: interpreted anywhere, held to torch's own."""

import pytest
import torch
from cases import qkv

import longspan
from longspan.attention.convolution import api

pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")

from longspan.attention.convolution import kernels
from longspan.attention.tiles import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
# Sums in float32 on both sides, in another order; 16-bit weights, values and results are rounded.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def check(v, weight, mask):
    """Both passes against torch in float64; what is masked is NaN."""
    y, g = (torch.randn(v.shape, device=v.device).to(v.dtype) for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (y, v, weight)]
    exact = api.reference(*leaves, mask)
    expected = exact, *torch.autograd.grad(exact, leaves[1:], g.double())
    if mask is not None:
        v = v.masked_fill(~mask[:, None, :, None], torch.nan)
    (out,) = kernels.convolution_forward(y, v, weight, mask)
    found = out, *kernels.convolution_backward(g, v, weight, mask)
    for name, a, b in zip(("y", "dv", "dweight"), found, expected, strict=True):
        assert a.shape == b.shape
        error = (a.double() - b).norm()
        assert error <= ROUNDING[v.dtype] * b.norm(), (name, error / b.norm())


SHAPES = {
    "plain": dict(queries=75),
    "a-tile": dict(queries=64),
    "one": dict(queries=1),
    "odd": dict(queries=33, channels=20),
    "wide": dict(queries=70, channels=129),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("size", [1, 5, 33, 71])
def test_both_passes_are_those_of_torch(shape, masked, size):
    _, _, v = qkv(batch=2, heads=3, **shape, device=DEVICE)
    mask = torch.rand(2, v.shape[2], device=DEVICE) < 0.6 if masked else None
    check(v, torch.randn(3, 1, size, 1, device=DEVICE), mask)


def test_runs_of_a_long_sequence_are_added_up():
    _, _, v = qkv(batch=1, heads=1, queries=1000, device=DEVICE)
    check(v, torch.randn(1, 1, 7, 1, device=DEVICE), None)


def test_any_strides_will_do():
    _, _, v = qkv(batch=2, heads=3, queries=40, channels=32, device=DEVICE)
    weight = torch.randn(3, 1, 9, 1, device=DEVICE)
    check(v.transpose(1, 2).contiguous().transpose(1, 2), weight, None)
    check(v[..., ::2], weight, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_each_gradient_has_the_dtype_of_what_it_belongs_to(dtype):
    """Under autocast the output may be of another dtype than the values, and so is its gradient."""
    _, _, v = qkv(batch=2, heads=3, queries=70, channels=32, dtype=dtype, device=DEVICE)
    other = torch.float32 if dtype == torch.float16 else torch.float16
    y, g = (torch.randn(v.shape, device=DEVICE).to(other) for _ in range(2))
    weight = torch.randn(3, 1, 9, 1, device=DEVICE)
    (out,) = kernels.convolution_forward(y, v, weight, None)
    dv, dweight = kernels.convolution_backward(g, v, weight, None)
    assert (out.dtype, dv.dtype, dweight.dtype) == (y.dtype, v.dtype, weight.dtype)
    leaves = [x.double().requires_grad_() for x in (v, weight)]
    exact = api.reference(y.double(), *leaves, None)
    expected = exact, *torch.autograd.grad(exact, leaves, g.double())
    for a, b in zip((out, dv, dweight), expected, strict=True):
        assert (a.double() - b).norm() <= ROUNDING[torch.float16] * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("channels", [32, 64, 128, 256])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_every_dtype_and_width(dtype, channels, masked):
    _, _, v = qkv(batch=3, heads=2, queries=2050, channels=channels, dtype=dtype, device="cuda")
    mask = torch.rand(3, 2050, device="cuda") < 0.6 if masked else None
    check(v, torch.randn(2, 1, 35, 1, device="cuda").to(dtype), mask)


@pytest.mark.gpu
# torch's own, when it compiles an autograd.Function, and looks at float32 products.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_modules_take_it_and_compile_whole():
    q, k, v = qkv(queries=300, channels=64, device="cuda", requires_grad=True)
    mask = torch.rand(2, 300, device="cuda") < 0.6
    found = []
    for impl in ("reference", "fused"):
        torch.manual_seed(0)
        module = longspan.NystromAttention(3, num_landmarks=16, conv_kernel=9, impl=impl).cuda()
        for run in (module, torch.compile(module, fullgraph=True)):
            y = run(q, k, v, key_mask=mask)
            leaves = (q, k, v, module.conv.weight)
            found.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            # float32 throughout; the steps of the inverse make its rounding larger.
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
