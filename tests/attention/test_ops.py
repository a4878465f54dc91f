"""What compilers are told of the CUDA ops: shapes and dtypes of both passes, without a GPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import longspan  # noqa: F401  registers the ops

# Of the forward, after the inputs; of the backward, after the inputs, and after what is kept.
OPTIONS = {
    "window": ((None, 5, 1.0), (None,), (5, 1.0)),
    "nystrom": ((None, 8, 6, False, 1.0), (None,), (6, False, 1.0)),
    "linformer": ((None, 1.0), (None,), (1.0, True)),
    "yoso_expectation": ((8, True), (), (8, False, True)),
    "yoso": ((None, None, 3, None, 4, 8, True, True), (None,), (None, 3, 8, 4, True, False)),
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
