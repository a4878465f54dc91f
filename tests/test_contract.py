"""What every method promises, on every implementation and device."""

import pytest
import torch
from cases import OPTIONS, contract, function, precise, qkv, relative_error

import longspan

everything = pytest.mark.parametrize(("method", "impl", "device"), contract())

SHAPES = {
    "one-token": dict(queries=1),
    "seven": dict(queries=7),
    "521": dict(batch=1, heads=2, queries=521),
    "one-query": dict(queries=1, keys=40),
    "one-key": dict(queries=13, keys=1),
    "more-keys": dict(queries=23, keys=61),
    "more-queries": dict(queries=61, keys=23),
    "wide-values": dict(queries=30, channels=16, value_channels=40),
    "narrow-values": dict(queries=30, channels=48, value_channels=8),
    "80-channels": dict(queries=30, channels=80),
    "one-head": dict(batch=3, heads=1, queries=33),
    "empty-batch": dict(batch=0, queries=20),
}


def gradients(attend, q, k, v, grad, **options):
    """Output and the gradients of q, k, v for a given gradient of the output."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    y = attend(*leaves, **options)
    y.backward(grad)
    return [y.detach(), *(x.grad for x in leaves)]


@everything
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_any_shape_gives_finite_output_and_gradients(method, impl, device, shape):
    q, k, v = qkv(**shape, device=device)
    attend = function(method, impl, keys=k.shape[2], device=device)
    grad = torch.randn(*q.shape[:3], v.shape[3], device=device)
    y, dq, dk, dv = gradients(attend, q, k, v, grad)
    assert y.shape == (*q.shape[:3], v.shape[3])
    for result, like in ((dq, q), (dk, k), (dv, v)):
        assert result.shape == like.shape
        assert result.isfinite().all()
    assert y.isfinite().all()


@pytest.mark.parametrize("method", ["window", "reformer", "yoso", "nystrom"])
def test_a_hundred_thousand_and_three_tokens(method):
    """Linear methods at a length that no block divides, both passes."""
    q, k, v = qkv(batch=1, heads=1, queries=100_003)
    attend = function(method, "" if method in ("window", "reformer") else "reference")
    assert all(x.isfinite().all() for x in gradients(attend, q, k, v, torch.ones_like(v)))


@everything
def test_gradients_reach_every_input(method, impl, device):
    q, k, v = qkv(device=device)
    attend = function(method, impl, keys=50, device=device)
    _, *grads = gradients(attend, q, k, v, torch.randn_like(v))
    assert all(grad.abs().sum() > 0 for grad in grads)


# Against float64 on the same rounded inputs. Sums are kept in float32, so what remains is the
# rounding of the output and, where torch's half-precision kernels are used, of softmax weights;
# Nyström amplifies it by its inverse (its fact sheet: 0.7 to 2.7 % for bfloat16).
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}


@everything
@pytest.mark.parametrize("dtype", ROUNDING, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_low_precision_stays_near_float64(method, impl, device, dtype):
    q, k, v = qkv(dtype=dtype, device=device)
    grad = torch.randn_like(v)
    attend = function(method, impl, keys=50, device=device)
    exact = function(method, "reference" if impl else "", keys=50, device=device)
    low = gradients(attend, q, k, v, grad)
    high = gradients(exact, q.double(), k.double(), v.double(), grad.double())
    tolerance = ROUNDING[dtype] * (3 if method == "nystrom" else 1)
    for name, actual, expected in zip(("y", "dq", "dk", "dv"), low, high, strict=True):
        assert actual.dtype == dtype
        assert relative_error(actual, expected) < tolerance, name


@everything
def test_padding_never_matters(method, impl, device):
    """A padded batch equals its sequences alone, with NaN in every masked place, both passes."""
    lengths = [50, 37, 20, 3]
    dtype, rounding = precise(impl)
    q, k, v = qkv(batch=4, device=device, dtype=dtype)
    key_mask = torch.arange(50, device=device) < torch.tensor(lengths, device=device)[:, None]
    hidden = ~key_mask[:, None, :, None]
    poison = [k.masked_fill(hidden, torch.nan), v.masked_fill(hidden, torch.nan)]
    grad = torch.randn_like(v).masked_fill(hidden, 0)
    attend = function(method, impl, keys=50, device=device)
    batch = gradients(attend, q, *poison, grad, key_mask=key_mask)
    for i, n in enumerate(lengths):
        attend = function(method, impl, keys=n, device=device)
        alone = gradients(attend, *(x[i : i + 1, :, :n] for x in (q, k, v, grad)))
        for name, whole, part in zip(("y", "dq", "dk", "dv"), batch, alone, strict=True):
            assert relative_error(whole[i : i + 1, :, :n], part) < rounding, (name, n)
            if name != "y":
                assert (whole[i, :, n:] == 0).all(), (name, n)


# The others know places: removing keys would move those left.
@pytest.mark.parametrize(
    ("method", "impl", "device"),
    [c for c in contract() if c.values[0] not in ("window", "strided", "linformer")],
)
def test_a_mask_with_holes_equals_the_keys_left(method, impl, device):
    dtype, rounding = precise(impl)
    q, k, v = qkv(queries=20, keys=50, device=device, dtype=dtype)
    keep = (torch.arange(50, device=device) % 3 != 1).expand(2, -1)
    attend = function(method, impl, keys=50, device=device)
    grad = torch.randn(2, 3, 20, 16, dtype=dtype, device=device)
    masked = gradients(attend, q, k, v, grad, key_mask=keep)
    removed = gradients(attend, q, k[:, :, keep[0]], v[:, :, keep[0]], grad)
    for name, actual, expected in zip(("y", "dq", "dk", "dv"), masked, removed, strict=True):
        actual = actual[:, :, keep[0]] if name in ("dk", "dv") else actual
        assert relative_error(actual, expected) < rounding, name


@everything
def test_no_visible_key_gives_zeros_and_no_gradient(method, impl, device):
    q, k, v = qkv(device=device)
    k[0], v[0] = torch.nan, torch.inf
    key_mask = torch.ones(2, 50, dtype=torch.bool, device=device)
    key_mask[0] = False
    attend = function(method, impl, keys=50, device=device)
    results = gradients(attend, q, k, v, torch.randn_like(q), key_mask=key_mask)
    for result in results:
        assert (result[0] == 0).all()
        assert result[1].isfinite().all()
        assert result[1].abs().sum() > 0


@everything
def test_a_sample_does_not_depend_on_its_neighbours(method, impl, device):
    dtype, rounding = precise(impl)
    q, k, v = qkv(batch=3, device=device, dtype=dtype)
    attend = function(method, impl, keys=50, device=device)
    whole = attend(q, k, v)
    loud = attend(torch.cat([q[:1], 20 * q[1:]]), torch.cat([k[:1], 20 * k[1:]]), v)
    assert relative_error(whole[1:2], attend(q[1:2], k[1:2], v[1:2])) < rounding
    assert relative_error(loud[:1], whole[:1]) < rounding


def fix_order(method, impl, device, request):
    """torch's fused kernels add in any order on a GPU unless torch is told not to; ours do not."""
    if device == "cuda" and impl != "fused" and method not in ("strided", "reformer", "yoso"):
        request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
        torch.use_deterministic_algorithms(True)


@everything
def test_the_same_call_gives_the_same_bits(method, impl, device, request):
    fix_order(method, impl, device, request)
    q, k, v = qkv(queries=200, device=device)
    attend = function(method, impl, keys=200, device=device)
    grad = torch.randn_like(v)
    first, second = (gradients(attend, q, k, v, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@everything
def test_any_strides(method, impl, device):
    q, k, v = qkv(device=device)
    attend = function(method, impl, keys=50, device=device)
    scattered = []
    for x in (q, k, v):
        wide = torch.full((2, 50, 3, 40), torch.nan, device=device)
        wide[..., 3:35:2] = x.transpose(1, 2)
        scattered.append(wide[..., 3:35:2].transpose(1, 2))
    grad = torch.randn_like(v).transpose(2, 3).contiguous().transpose(2, 3)
    strided = gradients(attend, *scattered, grad)
    plain = gradients(attend, q, k, v, grad.contiguous())
    for actual, expected in zip(strided, plain, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@everything
def test_tensors_by_keyword_are_the_same_call(method, impl, device):
    q, k, v = qkv(device=device)
    options = dict(function(method, impl, keys=50, device=device).keywords)
    row = longspan.METHODS[options.pop("method")]
    assert torch.equal(row.function(q=q, k=k, v=v, **options), row.function(q, k, v, **options))


@everything
def test_autocast_does_not_lower_the_precision(method, impl, device):
    q, k, v = qkv(device=device)
    attend = function(method, impl, keys=50, device=device)
    with torch.autocast(device, torch.bfloat16):
        y = attend(q, k, v)
    assert y.dtype == torch.float32
    assert torch.equal(y, attend(q, k, v))


# torch's own: its tracer uses what torch deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@everything
def test_compiles_to_one_graph(method, impl, device):
    q, k, v = qkv(device=device, requires_grad=True)
    key_mask = torch.arange(50, device=device).expand(2, -1) < 45
    attend = function(method, impl, keys=50, device=device)
    torch.compiler.reset()
    # "aot_eager" traces both passes into full graphs and needs no compiler on the machine.
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    y, expected = compiled(q, k, v, key_mask=key_mask), attend(q, k, v, key_mask=key_mask)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(y)
    actual = torch.autograd.grad(y, (q, k, v), grad)
    for a, b in zip(actual, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@everything
def test_gradient_checkpointing_repeats_the_forward(method, impl, device, request):
    from torch.utils.checkpoint import checkpoint

    fix_order(method, impl, device, request)
    q, k, v = qkv(device=device, requires_grad=True)
    options = {"seed": None} if "seed" in OPTIONS.get(method, {}) else {}
    attend = function(method, impl, keys=50, device=device, **options)
    results = []
    for run in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        torch.manual_seed(5)
        y = run(q, k, v)
        results.append([y, *torch.autograd.grad(y.square().sum() + y.sum(), (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@everything
def test_the_module_computes_the_function(method, impl, device):
    q, k, v = qkv(device=device)
    options = {**OPTIONS.get(method, {}), **({"impl": impl} if impl else {})}
    if method == "linformer":
        options |= {"max_length": 50, "projected_length": 7}
    if method == "yoso":
        options["exact_below"] = 0
    module = longspan.METHODS[method].module(3, **options).to(device).eval()
    if method == "linformer":
        e, f = (p.matrix(50) for p in (module.key_projection, module.value_projection))
        expected = longspan.linformer(q, k, v, e, f, impl=impl)
    else:
        expected = function(method, impl, keys=50, device=device)(q, k, v)
    assert torch.equal(module(q, k, v), expected)
