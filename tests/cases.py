"""Every method as the contract tests call it: at sizes where its approximation is at work.

A kernel joins by existing: `implementations` asks the table which can run on a device.
"""

from functools import partial

import pytest
import torch

import longspan
from longspan.attention.base import unit
from longspan.attention.random import gaussian

# Options at which nothing degenerates to exact attention at the lengths tested, and at which a
# padded batch equals its sequences alone (strided's default stride follows the padded length).
OPTIONS: dict[str, dict] = {
    "window": {"window": 9},
    "strided": {"stride": 6},
    "reformer": {"bucket_size": 8, "seed": 3},
    "yoso": {"num_hashes": 5, "hash_bits": 3, "seed": 3},
    "yoso_expectation": {"hash_bits": 3},
    "nystrom": {"num_landmarks": 6},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def implementations(method: str, device: str) -> list[str]:
    """The values of `impl` that run on a device; [""] for a method without the option."""
    why_not = longspan.METHODS[method].why_not_fused
    if why_not is None:
        return [""]
    return ["reference"] if why_not(torch.device(device)) else ["reference", "fused"]


def contract() -> list:
    """(method, impl, device) for everything that exists, with readable ids."""
    cases = []
    for method in longspan.METHODS:
        for device in ("cpu", "cuda"):
            marks = [pytest.mark.gpu] if device == "cuda" else []
            cases += [
                pytest.param(
                    method, impl, device, marks=marks, id=f"{method}-{impl or 'torch'}-{device}"
                )
                for impl in implementations(method, device)
            ]
    emulated = pytest.param(
        "yoso", "fused", "cpu", marks=pytest.mark.emulated, id="yoso-fused-emulated"
    )
    return [*cases, emulated]


def function(method: str, impl: str = "", keys: int | None = None, device: str = "cpu", **options):
    """`longspan.attention` with the options of the contract; Linformer gets projections."""
    options = {**OPTIONS.get(method, {}), **options}
    if impl:
        options["impl"] = impl
    if method == "linformer":
        # Column i depends on i alone, so a shorter sequence sees the first columns of a longer one.
        columns = [gaussian(i, (2, 7), torch.device("cpu")) for i in range(keys)]
        e, f = torch.stack(columns, -1).to(device) / 4
        options |= {"key_projection": e, "value_projection": f}
    return partial(longspan.attention, method=method, **options)


def qkv(
    batch=2, heads=3, queries=50, keys=None, channels=16, value_channels=None, *,
    dtype=torch.float32, device="cpu", seed=0, requires_grad=False,
):  # fmt: skip
    """Random q, k and v, drawn on the CPU so that every device sees the same."""
    generator = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    sizes = (queries, channels), (keys, channels), (keys, value_channels or channels)
    return [
        torch.randn(batch, heads, *size, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_(requires_grad)
        for size in sizes
    ]


def precise(impl: str) -> tuple[torch.dtype, float]:
    """The widest dtype of an implementation, and the relative error that is rounding in it."""
    return (torch.float32, 1e-5) if impl == "fused" else (torch.float64, 1e-9)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; NaN counts as infinite."""
    actual, expected = actual.detach().double(), expected.detach().double().to(actual.device)
    error = (actual - expected).norm() / expected.norm().clamp(min=1e-300)
    return float(error.nan_to_num(torch.inf))


def held_to_the_reference(
    attend, case, masked, dtype, floor=lambda name, exact: 0, learned=None, **options
):
    """On a GPU: at most twice as wrong, against float64, as the reference in the same dtype.

    `floor(name, exact)` is what rounding may add where the reference happens to round less.
    `learned` are tensors by keyword that have gradients too.
    """
    learned = learned or {}
    case = {"batch": 2, "heads": 2, **case}
    q, k, v = qkv(**case, dtype=dtype, device="cuda")
    if masked:
        options["key_mask"] = torch.rand(case["batch"], k.shape[2], device="cuda") < 0.7
    g = torch.randn(*q.shape[:3], v.shape[3], device="cuda").to(dtype)
    results = []
    for impl, wide in (("fused", dtype), ("reference", dtype), ("reference", torch.float64)):
        given = (q, k, v, *learned.values())
        leaves = [x.to(wide).detach().clone().requires_grad_() for x in given]
        more = dict(zip(learned, leaves[3:], strict=True))
        y = attend(*leaves[:3], impl=impl, **more, **options)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, g.to(wide))])
    names = "y", "dq", "dk", "dv", *learned
    exact = dict(zip(names, results[2], strict=True))
    for name, kernel, plain in zip(names, *results[:2], strict=True):
        error, usual = ((x.double() - exact[name]).norm() for x in (kernel, plain))
        said = [float(x / exact[name].norm()) for x in (error, usual)]
        assert error <= 2 * usual + floor(name, exact), (name, *said)


def allowed_errors(q, k, v, g, **options):
    """The name, exact value and largest error of y, dq, dk and dv of a kernel of `yoso`.

    Twice the reference's error in the dtype of the inputs, against float64. Where rows are scaled
    to length one, a kernel takes g through the unit vector of y as it gave it out, and rounds the
    result; the reference keeps both in float32, so what either changes is added to its error. It
    is all there is where a query meets one key: g·v is then zero but for rounding.
    """
    results = []
    for dtype in (v.dtype, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        y = longspan.yoso(*leaves, impl="reference", **options)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, g.to(dtype))])
    errors = [(plain.double() - exact).norm() for plain, exact in zip(*results, strict=True)]
    if options.get("normalize", True):
        total = longspan.yoso(*leaves, impl="reference", **{**options, "normalize": False})
        norm, row = total.detach().norm(dim=-1, keepdim=True), unit(total.detach())

        def through(row):
            along = (g.double() * row).sum(-1, keepdim=True)
            return ((g.double() - along * row) / norm).masked_fill(norm == 0, 0)

        for rounded in (through(row.to(v.dtype).double()), through(row).to(v.dtype).double()):
            grads = torch.autograd.grad(total, leaves[:2], rounded, retain_graph=True)
            for i, grad in zip((1, 2), grads, strict=True):
                errors[i] = torch.hypot(errors[i], (grad - results[1][i]).norm())
    allowed = [2 * error for error in errors]
    return list(zip(("y", "dq", "dk", "dv"), results[1], allowed, strict=True))
