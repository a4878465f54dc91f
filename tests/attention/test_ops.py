"""The CUDA ops without a GPU: what compilers are told of them, and how kernels are launched."""

import ctypes
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import longspan
from longspan.attention import nvrtc, tape

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


class Driver:
    """Launches that fail as told, and notes what the others were given."""

    def __init__(self, *errors):
        self.errors, self.entered, self.given = list(errors), 0, []

    def cuLaunchKernel(self, handle, *sizes):
        *sizes, shared, stream, addresses, _ = sizes
        places = ctypes.cast(addresses, ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)))
        values = [places[i][0] for i in range(4)]
        self.given.append((handle, *sizes, shared, stream, *values))
        name = self.errors.pop(0)
        return (SimpleNamespace(name=name) if name else 0,)

    def cuCtxGetCurrent(self):
        self.entered += 1
        return 0, 1


def launch(monkeypatch, *errors, again=False):
    driver = Driver(*errors)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    x = torch.zeros(3)
    run = nvrtc.Launch("rows.finish", 11, 4, 256, 128)
    if again:
        place = tape.Place(1, 8, x.to("meta"))
        run.again(7, [place, 1 << 40, 1.0, None])([x], [0, x.data_ptr() - 8])
    else:
        run(7, [x, 1 << 40, 1.0, None])
    assert driver.given[-1] == (
        11,
        7,
        1,
        1,
        256,
        1,
        1,
        128,
        5,
        x.data_ptr(),
        1 << 40,
        0x3F800000,
        0,
    )
    return driver


def test_a_launch_hands_over_the_bits_of_its_arguments(monkeypatch):
    assert launch(monkeypatch, None).entered == 0
    assert launch(monkeypatch, None, again=True).entered == 0


def test_a_thread_without_a_context_is_given_one(monkeypatch):
    driver = launch(monkeypatch, "CUDA_ERROR_INVALID_CONTEXT", None)
    assert (driver.entered, len(driver.given)) == (1, 2)


def test_a_launch_that_fails_says_which(monkeypatch):
    message = "rows.finish could not be launched: CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(RuntimeError, match=message):
        launch(monkeypatch, "CUDA_ERROR_OUT_OF_MEMORY")


def test_a_kernel_is_allowed_its_shared_memory_once(monkeypatch):
    driver = Driver(None, None)
    asked, errors = [], [0, SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")]
    most = {"CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8}
    driver.CUfunction_attribute = SimpleNamespace(**most)
    driver.cuKernelSetAttribute = lambda *given: asked.append(given) or (errors.pop(0),)
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "_load", lambda *_: SimpleNamespace(handle=11))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 5, raising=False)
    run = nvrtc.launcher(Path("codes.cu"))
    for _ in range(2):
        run("bucket_lists_32k", 7, 1024, 1, 2, 3, 4, shared=1 << 16)
    assert asked == [(8, 1 << 16, 11, 0)]
    assert [given[:9] for given in driver.given] == [(11, 7, 1, 1, 1024, 1, 1, 1 << 16, 5)] * 2
    with pytest.raises(RuntimeError, match="memory are too many: CUDA_ERROR_INVALID_VALUE"):
        run("another", 7, 1024, 1, 2, 3, 4, shared=1 << 16)
