"""The CUDA ops without a GPU: what compilers are told of them."""

import importlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import longspan

# Of the forward, after the inputs; of the backward, after the inputs, and after what is kept.
OPTIONS = {
    "window": ((None, 5, 1.0), (None,), (5, 1.0)),
    "nystrom": ((None, 8, 6, False, 1.0, True), (None,), (6, False, 1.0)),
    "linformer": ((None, 1.0), (None,), (1.0, True)),
    "yoso_expectation": ((8, True), (), (8, False, True)),
    "yoso": ((None, None, 3, None, 4, 8, True, True), (None,), (None, 3, 8, 4, True, False, False)),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_gradients_are_like_what_they_are_of(name, dtype):
    forward, before, after = OPTIONS[name]
    ops = torch.ops.longspan
    with FakeTensorMode():
        q, k, v, g = (
            torch.empty(2, 3, tokens, width, dtype=dtype, device="cuda")
            for tokens, width in ((40, 16), (50, 16), (50, 24), (40, 24))
        )
        projections = [torch.empty(8, 50, dtype=dtype, device="cuda")] * 2
        inputs = [q, k, v, *(projections if name == "linformer" else [])]
        y, *kept = getattr(ops, f"{name}_forward")(*inputs, *forward)
        grads = getattr(ops, f"{name}_backward")(g, *inputs, *before, y, *kept, *after)
        assert (y.shape, y.dtype) == (g.shape, dtype)
        found = [(x.shape, x.dtype, x.device) for x in grads]
        assert found == [(x.shape, x.dtype, x.device) for x in inputs]


@pytest.mark.parametrize("name", OPTIONS)
def test_inference_makes_the_output_alone(name):
    place = "yoso.expectation" if name == "yoso_expectation" else f"{name}.kernels"
    kernels = importlib.import_module(f"longspan.attention.{place}")
    options = {
        "window": (None, 5, None),
        "yoso_expectation": (None, 8, "surrogate", True),
        "nystrom": (None, 8, 6, "exact", None),
        "linformer": (None, None),
        "yoso": (None, 4, 8, "gaussian", "surrogate", 4, True, 3),
    }
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 3, 40, 16, device="cuda") for _ in range(3))
        projections = [torch.empty(8, 40, device="cuda")] * (2 if name == "linformer" else 0)
        y = getattr(kernels, name)(q, k, v, *projections, *options[name])
        assert y.shape == v.shape


class Seen(TorchDispatchMode):
    """Which ops torch's dispatcher handed on."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.gpu
def test_modes_see_ops_that_otherwise_go_past_the_dispatcher(monkeypatch):
    q, k, v = (torch.randn(1, 2, 40, 16, device="cuda") for _ in range(3))
    with Seen() as seen:
        watched = longspan.window(q, k, v, window=4, impl="fused")
    assert "longspan.window_forward.default" in seen.names
    monkeypatch.setattr(torch.ops.longspan, "window_forward", None)
    assert torch.equal(longspan.window(q, k, v, window=4, impl="fused"), watched)
