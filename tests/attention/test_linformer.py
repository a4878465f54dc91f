"""What only Linformer has: projections, their sharing and their lengths."""

import pytest
import torch
from cases import qkv, relative_error

import longspan
from longspan import LinformerAttention, SequenceProjection


def test_identity_projections_are_softmax():
    q, k, v = qkv(queries=30, keys=40, dtype=torch.float64)
    eye = torch.eye(40, dtype=torch.float64)
    expected = longspan.softmax(q, k, v, scale=0.3)
    assert relative_error(longspan.linformer(q, k, v, eye, eye, scale=0.3), expected) < 1e-12


def test_per_head_projections_match_a_loop_over_heads():
    q, k, v = qkv(dtype=torch.float64)
    e, f = torch.randn(2, 3, 7, 50, dtype=torch.float64)
    y = longspan.linformer(q, k, v, e, f)
    for h in range(3):
        one = longspan.linformer(q[:, h : h + 1], k[:, h : h + 1], v[:, h : h + 1], e[h], f[h])
        assert relative_error(y[:, h : h + 1], one) < 1e-12


def test_gradients_reach_the_projections():
    inputs = qkv(batch=2, heads=2, queries=5, channels=3, dtype=torch.float64, requires_grad=True)
    projections = [torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    key_mask = torch.arange(5) < torch.tensor([[5], [3]])
    attend = lambda *x: longspan.linformer(*x, key_mask=key_mask)  # noqa: E731
    assert torch.autograd.gradcheck(attend, (*inputs, *projections))


@pytest.mark.parametrize(
    ("sharing", "matrices"), [("none", 288), ("headwise", 24), ("key-value", 12), ("layerwise", 1)]
)
def test_sharing_counts_as_the_paper_does(sharing, matrices):
    """Twelve layers of twelve heads."""
    projection = SequenceProjection(8, 2) if sharing == "layerwise" else "linear"
    layers = torch.nn.ModuleList(
        LinformerAttention(
            12, max_length=8, projected_length=2, sharing=sharing, projection=projection
        )
        for _ in range(12)
    )
    assert sum(p.numel() for p in layers.parameters()) == matrices * 8 * 2


def test_shared_projections_stay_shared_after_loading():
    make = lambda: LinformerAttention(2, max_length=20, projected_length=4, sharing="key-value")  # noqa: E731
    first, second = make(), make()
    second.load_state_dict(first.state_dict())
    assert second.key_projection.weight is second.value_projection.weight
    q, k, v = qkv(heads=2, queries=20)
    assert torch.equal(first(q, k, v), second(q, k, v))


def test_a_shorter_input_is_the_padded_one():
    module = LinformerAttention(3, max_length=40, projected_length=6).double()
    q, k, v = qkv(queries=25, dtype=torch.float64)
    zeros = torch.zeros(2, 3, 15, 16, dtype=torch.float64)
    padded = module(q, torch.cat([k, zeros], 2), torch.cat([v, zeros], 2))
    assert relative_error(module(q, k, v), padded) < 1e-12


def test_a_longer_input_stretches_the_matrix():
    projection = SequenceProjection(16, 4)
    with torch.no_grad():
        projection.weight.copy_(torch.linspace(0, 1, 16).expand(1, 4, 16))
    stretched = projection.matrix(64)
    assert stretched.shape == (4, 64)
    # The ramp stays a ramp, and a constant sequence keeps its projection.
    assert (stretched.diff(dim=-1) >= 0).all()
    torch.testing.assert_close(stretched.sum(-1), projection.matrix(16).sum(-1))


@pytest.mark.parametrize("kind", ["linear", "convolution", "mean-pool"])
@pytest.mark.parametrize("sharing", ["none", "headwise", "key-value"])
def test_padding_never_matters(kind, sharing):
    module = LinformerAttention(
        3, max_length=40, projected_length=6, projection=kind, sharing=sharing
    ).double()
    if module.key_projection.weight is not None:
        torch.nn.init.normal_(module.key_projection.weight)
    q, k, v = qkv(queries=40, dtype=torch.float64)
    key_mask = torch.arange(40) < torch.tensor([[40], [23]])
    k[1, :, 23:], v[1, :, 23:] = torch.nan, torch.nan
    y = module(q, k, v, key_mask=key_mask)
    alone = module(q[1:, :, :23], k[1:, :, :23], v[1:, :, :23])
    assert relative_error(y[1:, :, :23], alone) < 1e-10


@pytest.mark.parametrize("kind", ["linear", "convolution", "mean-pool"])
@pytest.mark.parametrize("tokens", [1, 7, 40, 41, 100])
def test_every_projection_takes_any_length(kind, tokens):
    module = LinformerAttention(3, max_length=40, projected_length=6, projection=kind)
    q, k, v = qkv(queries=tokens, requires_grad=True)
    y = module(q, k, v)
    assert y.shape == q.shape
    y.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v, *module.parameters()))


def test_a_convolution_starts_as_the_mean_of_its_stride():
    x = torch.randn(2, 3, 40, 5)
    y, visible = SequenceProjection(40, 10, kind="convolution")(x)
    torch.testing.assert_close(y, x.unflatten(2, (10, 4)).mean(3))
    assert visible.all()


def test_layerwise_sharing_wants_the_shared_projection():
    with pytest.raises(ValueError, match="projection must be a SequenceProjection"):
        LinformerAttention(2, max_length=8, sharing="layerwise")
    with pytest.raises(ValueError, match="projection must be a SequenceProjection"):
        LinformerAttention(2, max_length=8, projection=SequenceProjection(8, 2))


def test_projecting_before_or_after_the_input_matrix_differs_by_the_bias():
    """(E X) W + b = E (X W + b) − (E·1 − 1) bᵀ: why the order matters unless rows of E sum to 1."""
    x, w, b, e = (torch.randn(*s, dtype=torch.float64) for s in ((9, 5), (5, 4), (4,), (3, 9)))
    difference = (e @ x) @ w + b - e @ (x @ w + b)
    torch.testing.assert_close(difference, -torch.outer(e.sum(1) - 1, b))


@pytest.mark.parametrize("sharing", ["headwise", "key-value"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_projecting_first_gives_the_same_output_and_gradients(sharing, masked):
    options = dict(max_length=30, projected_length=8, sharing=sharing, batch_first=True)
    plain = longspan.MultiheadAttention(24, 3, "linformer", **options).double()
    first = longspan.MultiheadAttention(24, 3, "linformer", project_first=True, **options).double()
    torch.nn.init.normal_(plain.in_proj_bias)  # zero at first, where the order would not matter
    first.load_state_dict(plain.state_dict())
    x = torch.randn(2, 20, 24, dtype=torch.float64)
    mask = torch.arange(20) >= torch.tensor([[20], [13]]) if masked else None
    ys = [m(x, x, x, key_padding_mask=mask)[0] for m in (plain, first)]
    torch.testing.assert_close(*ys)
    grads = [
        torch.autograd.grad(y.square().sum(), m.parameters())
        for y, m in zip(ys, (plain, first), strict=True)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_projecting_first_wants_shared_linear_projections():
    for options in (dict(sharing="none"), dict(projection="mean-pool"), dict(conv_kernel=3)):
        with pytest.raises(ValueError, match="project_first must go with linear projections"):
            longspan.MultiheadAttention(
                24, 3, "linformer", max_length=30, project_first=True, **options
            )


def test_means_are_summed_in_float32():
    many = torch.full((1, 1, 4096, 2), 100.0).half()
    short, _ = SequenceProjection(4096, 4, kind="mean-pool")(many)
    assert (short == 100).all()


@pytest.mark.parametrize("kind", ["linear", "convolution", "mean-pool"])
def test_autocast_does_not_lower_it(kind):
    module = LinformerAttention(3, max_length=40, projected_length=8, projection=kind)
    q, k, v = qkv(queries=40)
    expected = module(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(q, k, v), expected)


def test_what_has_no_kernel_is_refused_and_so_are_projections_elsewhere():
    module = longspan.MultiheadAttention(
        24, 3, method="linformer", max_length=40, projected_length=8, project_first=True,
        impl="fused",
    )  # fmt: skip
    x = torch.randn(2, 40, 24)
    with pytest.raises(NotImplementedError, match="no fused kernel for project_first=True"):
        module(x, x, x)
    q, k, v = qkv(queries=40)
    e = torch.randn(8, 40)
    with pytest.raises(ValueError, match=r"value_projection must be on the device of q \(cpu\)"):
        longspan.linformer(q, k, v, e, e.to("meta"))
