"""YOSO: the sampler against its expectation, its variance, its gradients; the tables."""

import math

import pytest
import torch
from cases import qkv, relative_error

import longspan
from longspan.attention import base
from longspan.attention.base import unit
from longspan.attention.module import EVAL_SEED
from longspan.attention.yoso import api, reference, tables
from longspan.attention.yoso.hashing import hash_codes, projections

F64 = torch.float64


def replicate(q, k, v, count):
    """The same q, k, v in `count` heads: hashes are drawn per head, so one call is many samples."""
    return [x.expand(-1, count, -1, -1) for x in (q, k, v)]


def collisions(q, k, seed, num_hashes, hash_bits, hashing="gaussian"):
    """The share of hashes in which each query meets each key: (B, H, Nq, Nk), by brute force."""
    planes = projections(hashing, seed, q.shape[1], q.shape[3], num_hashes, hash_bits, q.device)
    cq, ck = hash_codes(unit(q), planes), hash_codes(unit(k), planes)
    return (cq[..., :, None] == ck[..., None, :]).double().mean(2)


def z_scores(samples, expected):
    """(mean − expected) / standard error, over the heads."""
    error = samples.std(1, keepdim=True) / math.sqrt(samples.shape[1])
    return (samples.mean(1, keepdim=True) - expected) / error


def test_expectation_is_its_formula():
    q, k, v = qkv(queries=20, keys=30, dtype=F64)
    cosine = torch.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)
    y = (1 - cosine.acos() / math.pi) ** 5 @ v
    options = dict(hash_bits=5)
    assert relative_error(longspan.yoso_expectation(q, k, v, normalize=False, **options), y) < 1e-12
    expected = y / y.norm(dim=-1, keepdim=True)
    assert relative_error(longspan.yoso_expectation(q, k, v, **options), expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
@pytest.mark.parametrize("gradient", ["surrogate", "true"])
@pytest.mark.parametrize("sign", [1, -1])
def test_parallel_vectors_stay_finite(dtype, gradient, sign):
    """A seventh of float32 self-products exceed 1, where arccos is NaN and its slope infinite."""
    q, _, v = qkv(heads=8, queries=64, channels=64, dtype=dtype)
    for attend in (longspan.yoso_expectation, longspan.yoso):
        leaves = [
            q.clone().requires_grad_(),
            (sign * q).requires_grad_(),
            v.clone().requires_grad_(),
        ]
        y = attend(*leaves, gradient=gradient)
        grads = torch.autograd.grad(y, leaves, torch.randn_like(y))
        assert all(x.isfinite().all() for x in (y, *grads))


@pytest.mark.parametrize("normalize", [True, False])
def test_true_gradient_is_the_derivative(normalize):
    inputs = qkv(batch=1, heads=2, queries=6, keys=5, channels=4, dtype=F64, requires_grad=True)
    options = dict(hash_bits=5, gradient="true", normalize=normalize)
    assert torch.autograd.gradcheck(lambda *x: longspan.yoso_expectation(*x, **options), inputs)


def test_the_surrogate_is_a_lower_bound_of_the_true_slope():
    cosine = torch.linspace(-0.999, 0.999, 2001, dtype=F64)
    for bits in (1, 8, 16):
        ratio = reference.slope(cosine, bits) / (bits / 2)
        # The fact sheet: at least 1.099 everywhere, smallest at x = 0.442, for every τ.
        assert ratio.min() == pytest.approx(1.099, abs=1e-3)
        assert cosine[ratio.argmin()] == pytest.approx(0.442, abs=2e-3)


def surrogate_gradients(q, k, v, g, weight, hash_bits):
    """dQ, dK, dV of the paper for pair weights E, before the normalisation of q and k."""
    w = hash_bits / 2 * weight * (g @ v.mT)
    return w @ k, w.mT @ q, weight.mT @ g


def through_unit(x, grad):
    """The gradient of x from that of unit(x)."""
    length = x.norm(dim=-1, keepdim=True)
    return (grad - (grad * x).sum(-1, keepdim=True) * x / length**2) / length


def test_expected_surrogate_gradient_is_its_formula():
    q, k, v = qkv(queries=12, keys=9, dtype=F64, requires_grad=True)
    g = torch.randn(2, 3, 12, 16, dtype=F64)
    y = longspan.yoso_expectation(q, k, v, hash_bits=4, normalize=False)
    actual = torch.autograd.grad(y, (q, k, v), g)
    with torch.no_grad():
        weight = reference.collision_probability(unit(q) @ unit(k).mT, 4)
        dq, dk, dv = surrogate_gradients(unit(q), unit(k), v, g, weight, 4)
        expected = through_unit(q, dq), through_unit(k, dk), dv
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < 1e-12


CASES = {  # both sides of the switch between pairs and tables, light and heavy buckets
    "pairs": dict(queries=40, keys=30, channels=16),
    "tables": dict(queries=40, keys=90, channels=2),
    "tables-many-buckets": dict(queries=40, keys=90, channels=2, hash_bits=12),
    "tables-two-buckets": dict(queries=300, keys=200, channels=3, hash_bits=1),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("hashing", ["gaussian", "hadamard"])
@pytest.mark.parametrize("chunk", [None, 300], ids=["whole", "chunked"])
def test_given_codes_output_and_surrogate_gradient_are_sums_over_pairs(
    case, hashing, chunk, monkeypatch
):
    if chunk:
        monkeypatch.setattr(base, "CHUNK", chunk)
    case = dict(case)
    options = dict(hash_bits=case.pop("hash_bits", 4), num_hashes=5, hashing=hashing, seed=2)
    q, k, v = qkv(**case, value_channels=5, dtype=F64, requires_grad=True)
    g = torch.randn(2, 3, q.shape[2], 5, dtype=F64)
    y = longspan.yoso(q, k, v, normalize=False, **options)
    actual = [y, *torch.autograd.grad(y, (q, k, v), g)]
    with torch.no_grad():
        weight = collisions(q, k, 2, 5, options["hash_bits"], hashing)
        dq, dk, dv = surrogate_gradients(unit(q), unit(k), v, g, weight, options["hash_bits"])
        expected = weight @ v, through_unit(q, dq), through_unit(k, dk), dv
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a, b) < 1e-10, name


def test_given_codes_the_true_gradient_carries_the_inverse_probability():
    q, k, v = qkv(queries=20, keys=15, channels=4, dtype=F64, requires_grad=True)
    g = torch.randn(2, 3, 20, 4, dtype=F64)
    y = longspan.yoso(q, k, v, hash_bits=3, gradient="true", normalize=False, seed=2)
    actual = torch.autograd.grad(y, (q, k), g)
    with torch.no_grad():
        x = unit(q) @ unit(k).mT
        p = 1 - x.acos() / math.pi
        derivative = 3 * p**2 / (math.pi * (1 - x**2).sqrt())
        w = collisions(q, k, 2, 32, 3) / p**3 * derivative * (g @ v.mT)
        expected = through_unit(q, w @ unit(k)), through_unit(k, w.mT @ unit(q))
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < 1e-10


def test_the_output_is_the_unit_vector_of_the_sum():
    q, k, v = qkv(dtype=F64)
    raw = longspan.yoso(q, k, v, hash_bits=3, normalize=False, seed=2)
    assert torch.allclose(longspan.yoso(q, k, v, hash_bits=3, seed=2), unit(raw))


def test_adjoint_identity():
    """⟨G, E V⟩ = ⟨Eᵀ G, V⟩: the backward of the values is the forward with roles exchanged."""
    q, k, v = qkv(queries=40, keys=70, dtype=F64, requires_grad=True)
    g = torch.randn(2, 3, 40, 16, dtype=F64)
    y = longspan.yoso(q, k, v, normalize=False, seed=4)
    (dv,) = torch.autograd.grad(y, v, g)
    assert torch.allclose((g * y).sum(), (dv * v).sum())
    swapped = longspan.yoso(k, q, g, normalize=False, seed=4)
    assert relative_error(dv, swapped) < 1e-12


@pytest.mark.parametrize(("channels", "hash_bits"), [(6, 3), (16, 8), (33, 1)])
def test_the_sampler_is_unbiased(channels, hash_bits):
    q, k, v = qkv(batch=1, heads=1, queries=4, keys=6, channels=channels, dtype=F64)
    options = dict(hash_bits=hash_bits, normalize=False)
    expected = longspan.yoso_expectation(q, k, v, **options)
    samples = longspan.yoso(*replicate(q, k, v, 20_000), num_hashes=2, seed=1, **options)
    # Some hundred scores, one seed: four and a half standard errors are one run in a thousand.
    assert z_scores(samples, expected).abs().max() < 4.5


@pytest.mark.parametrize("gradient", ["surrogate", "true"])
def test_sampled_gradients_are_unbiased(gradient):
    q, k, v = qkv(batch=1, heads=1, queries=4, keys=5, channels=6, dtype=F64)
    g = torch.randn(1, 1, 4, 6, dtype=F64)
    options = dict(hash_bits=3, normalize=False, gradient=gradient)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    y = longspan.yoso_expectation(*leaves, **options)
    expected = torch.autograd.grad(y, leaves, g)
    leaves = [x.detach().clone().requires_grad_() for x in replicate(q, k, v, 20_000)]
    y = longspan.yoso(*leaves, num_hashes=2, seed=1, **options)
    samples = torch.autograd.grad(y, leaves, g.expand_as(y))
    for name, a, b in zip(("dq", "dk", "dv"), samples, expected, strict=True):
        assert z_scores(a, b).abs().max() < 4.5, name


@pytest.mark.parametrize("num_hashes", [1, 8])
@pytest.mark.parametrize("keys", [1, 7])
def test_the_variance_is_the_closed_form(num_hashes, keys):
    """Collisions of one hash are correlated across keys; three angles give the covariance."""
    hash_bits, count = 4, 40_000
    q, k, v = qkv(batch=1, heads=1, queries=3, keys=keys, channels=5, dtype=F64)
    q, k = unit(q), unit(k)
    qk, kk = (q @ k.mT).clamp(-1, 1).acos(), (k @ k.mT).clamp(-1, 1).acos()
    both = (1 - (qk[..., :, None] + qk[..., None, :] + kk[:, :, None]) / (2 * math.pi)) ** hash_bits
    single = (1 - qk / math.pi) ** hash_bits
    covariance = (both - single[..., :, None] * single[..., None, :]) / num_hashes
    expected = torch.einsum("bhijl,bhjd,bhld->bhid", covariance, v, v)
    if keys == 1:
        bernoulli = single * (1 - single) / num_hashes
        assert torch.allclose(expected, bernoulli * v.square())
    samples = longspan.yoso(
        *replicate(q, k, v, count),
        num_hashes=num_hashes,
        hash_bits=hash_bits,
        normalize=False,
        seed=3,
    )
    # So many samples know the variance to about 1 %; treating keys as independent is 9 % off.
    assert torch.allclose(samples.var(1, keepdim=True), expected, rtol=0.05)


def test_the_error_falls_as_one_over_the_root_of_the_hashes():
    q, k, v = qkv(queries=60, dtype=F64)
    options = dict(hash_bits=4, normalize=False)
    limit = longspan.yoso_expectation(q, k, v, **options)
    errors = [
        relative_error(longspan.yoso(q, k, v, num_hashes=m, seed=1, **options), limit)
        for m in (16, 256, 4096)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.2)


def test_order_of_tokens_and_scale_of_vectors_do_not_matter():
    q, k, v = qkv(dtype=F64)
    y = longspan.yoso(q, k, v, seed=1)
    order = torch.randperm(50)
    assert torch.allclose(longspan.yoso(q, k[:, :, order], v[:, :, order], seed=1), y)
    assert torch.allclose(longspan.yoso(q[:, :, order], k, v, seed=1), y[:, :, order])
    assert torch.allclose(longspan.yoso(1e-6 * q, 1e6 * k, v, seed=1), y)
    raw = longspan.yoso(q, k, v, seed=1, normalize=False)
    assert torch.allclose(longspan.yoso(q, k, -3 * v, seed=1, normalize=False), -3 * raw)


def test_a_row_without_collisions_is_zero_and_passes_no_gradient():
    q, k, v = qkv(batch=1, heads=1, queries=30, channels=16, requires_grad=True)
    y = longspan.yoso(q, k, v, hash_bits=16, num_hashes=1, seed=1)
    empty = y[0, 0].norm(dim=-1) == 0
    assert empty.sum() > 20
    grads = torch.autograd.grad(y, (q, k, v), torch.randn_like(y))
    assert (grads[0][0, 0][empty] == 0).all()
    assert all(grad.abs().max() < 1e3 for grad in grads)


def test_seeds():
    q, k, v = qkv()
    y = longspan.yoso(q, k, v, seed=1)
    assert torch.equal(longspan.yoso(q, k, v, seed=torch.tensor(1)), y)
    assert not torch.equal(longspan.yoso(q, k, v, seed=2), y)
    torch.manual_seed(7)
    drawn = longspan.yoso(q, k, v)
    assert not torch.equal(longspan.yoso(q, k, v), drawn)
    torch.manual_seed(7)
    assert torch.equal(longspan.yoso(q, k, v), drawn)


SAMPLING = dict(num_hashes=4, hash_bits=3, gradient="true", normalize=False)
EXPECTATION = dict(hash_bits=3, gradient="true", normalize=False)


def with_gradients(attend, q, k, v, **options):
    """Output, and the gradients of its sum of squares."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = attend(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_modules_are_the_expectation_below_exact_below(training):
    q, k, v = qkv(queries=20, keys=50)
    key_mask = torch.arange(50).expand(2, -1) < 31  # 31 visible of 50: the padded length counts
    module = longspan.YosoAttention(3, exact_below=51, seed=5, **SAMPLING).train(training)
    state = torch.get_rng_state()
    actual = with_gradients(module, q, k, v, key_mask=key_mask)
    expected = with_gradients(longspan.yoso_expectation, q, k, v, key_mask=key_mask, **EXPECTATION)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("exact_below", [50, 0], ids=["at", "never"])
def test_modules_sample_from_exact_below_on(exact_below):
    q, k, v = qkv(queries=60, keys=50)
    module = longspan.YosoAttention(3, exact_below=exact_below, **SAMPLING)
    torch.manual_seed(7)
    actual = [with_gradients(module, q, k, v) for _ in range(2)]
    torch.manual_seed(7)
    expected = [with_gradients(longspan.yoso, q, k, v, **SAMPLING) for _ in range(2)]
    for pair in zip(actual, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(*pair, strict=True))
    assert not torch.equal(actual[0][0], actual[1][0])
    y = module.eval()(q, k, v)
    assert torch.equal(y, longspan.yoso(q, k, v, seed=EVAL_SEED, **SAMPLING))


@pytest.mark.parametrize("reasons", [[], ["no kernel"]], ids=["fused", "no-kernel"])
@pytest.mark.parametrize(
    ("dtype", "below"),
    [(torch.bfloat16, 2048), (torch.float16, 1024), (torch.float32, 1024), (torch.float64, 0)],
    ids=["bfloat16", "float16", "float32", "float64"],
)
def test_the_default_of_exact_below_asks_for_a_fused_expectation(
    monkeypatch, dtype, below, reasons
):
    monkeypatch.setattr(api, "why_expectation_not_fused", lambda device: reasons)
    monkeypatch.setattr(api, "yoso_expectation", lambda q, k, v, **options: options)
    module = longspan.YosoAttention(1, **SAMPLING).eval()

    def run(keys):
        return module(*qkv(batch=1, heads=1, queries=1, keys=keys, dtype=dtype))

    expectation = {"key_mask": None, **EXPECTATION}
    assert isinstance(run(below or 1), torch.Tensor)
    if below and not reasons:
        assert run(below - 1) == expectation
    else:
        assert isinstance(run(max(below - 1, 1)), torch.Tensor)


def test_exact_below_is_an_option_of_modules_and_no_state():
    plain = longspan.MultiheadAttention(24, 3, conv_kernel=3)
    exact = longspan.MultiheadAttention(24, 3, conv_kernel=3, exact_below=100)
    exact.load_state_dict(plain.state_dict())
    assert "exact_below=100" in repr(exact)
    x = torch.randn(50, 2, 24)
    assert torch.equal(exact(x, x, x)[0], exact(x, x, x)[0])


def test_impl_is_honoured_below_exact_below():
    q, k, v = qkv()
    module = longspan.YosoAttention(3, exact_below=100, impl="fused")
    with pytest.raises(NotImplementedError, match="impl='fused' cannot run: yoso_expectation"):
        module(q, k, v)


def test_modules_draw_afresh_in_training_and_repeat_in_eval():
    q, k, v = qkv()
    module = longspan.YosoAttention(3, num_hashes=4)
    assert not torch.equal(module(q, k, v), module(q, k, v))
    module.eval()
    assert torch.equal(module(q, k, v), module(q, k, v))
    fixed = longspan.YosoAttention(3, num_hashes=4, seed=5)
    assert torch.equal(fixed(q, k, v), fixed(q, k, v))


def test_more_than_two_to_the_31_buckets():
    """B · H · m · 2^τ = 2.3 · 10⁹: codes are renumbered, tables hold no more rows than tokens."""
    q, k, v = qkv(batch=1, heads=64, queries=5, channels=8, requires_grad=True)
    options = dict(num_hashes=545, hash_bits=16, normalize=False, seed=1)
    assert 64 * options["num_hashes"] * 2**16 > 2**31
    y = longspan.yoso(q, k, v, **options)
    weight = collisions(q.detach(), k.detach(), 1, 545, 16)
    assert relative_error(y, weight @ v.double()) < 1e-5


def test_compact_keeps_equal_codes_equal():
    a, b = torch.randint(1 << 16, (2, 3, 4, 20)), torch.randint(1 << 16, (2, 3, 4, 30))
    b[..., :10] = a[..., 5:15]
    x, y, buckets = tables.compact(a, b, 1 << 16)
    assert torch.equal(x[..., None] == y[..., None, :], a[..., None] == b[..., None, :])
    assert buckets == 50
    assert max(x.max(), y.max()) < buckets
    same, _, buckets = tables.compact(a, b, 40)
    assert same is a
    assert buckets == 40


@pytest.mark.parametrize("spread", ["random", "one-bucket", "one-each"])
def test_tables_hold_the_sums_of_their_buckets(spread):
    codes = {
        "random": torch.randint(7, (2, 3, 4, 20)),
        "one-bucket": torch.full((2, 3, 4, 20), 6),
        "one-each": torch.arange(20).expand(2, 3, 4, -1) % 20,
    }[spread].int()
    x = torch.randn(2, 3, 20, 5, dtype=F64)
    table = tables.bucket_sum(codes, x, 20)
    onehot = torch.nn.functional.one_hot(codes.long(), 20).double()  # (B, H, m, N, buckets)
    assert torch.allclose(table, onehot.mT @ x[:, :, None])
    assert torch.allclose(tables.bucket_gather(table, codes), (onehot @ table).sum(2))
