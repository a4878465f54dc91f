"""The fused Nyström attention: interpreted anywhere, held to the reference on a GPU."""

import pytest
import torch
from cases import held_to_the_reference, qkv, relative_error

import longspan
from longspan.attention.base import segment_means
from longspan.attention.nystrom import kernels, reference
from longspan.attention.nystrom.segments import segments

pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")

from longspan.attention.nystrom import triton as verbs
from longspan.attention.tiles import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"


def masks(keys):
    """Padding at the end, holes, few tokens, none."""
    mask = torch.zeros(4, keys, dtype=torch.bool)
    mask[0] = True
    mask[1, : keys - 7] = True
    mask[2, ::3] = True
    mask[3, 5:8] = True
    return mask.to(DEVICE)


def both_passes(q, k, v, mask, landmarks, steps, init, g):
    """Output and gradients by the fused path, and by the reference in float64."""
    scale = q.shape[3] ** -0.5
    y, *saved = kernels.nystrom_forward(
        q, k, v, mask, landmarks, steps, init == "original", scale, True
    )
    grads = kernels.nystrom_backward(g, q, k, v, mask, y, *saved, steps, init == "original", scale)
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    exact = reference.nystrom(*leaves, mask, landmarks, steps, init, None)
    return [y, *grads], [exact, *torch.autograd.grad(exact, leaves, g.double())]


SHAPES = {
    "plain": dict(queries=48, landmarks=6),
    "uneven": dict(queries=50, landmarks=7),
    "cross": dict(queries=21, keys=45, landmarks=5),
    "alone": dict(queries=9, landmarks=16),
    "as-many-keys": dict(queries=40, keys=16, landmarks=16),
    "few-queries": dict(queries=5, keys=40, landmarks=16),
    "wide-values": dict(queries=30, landmarks=20, channels=24, value_channels=40),
}


# The interpreter is slow: two steps of the iteration, but in one case.
CASES = [
    *((name, masked, "exact", 2) for name in SHAPES for masked in (False, True)),
    ("plain", False, "exact", 6),
    ("uneven", False, "original", 2),
    ("uneven", True, "original", 2),
]


@pytest.mark.parametrize(("shape", "masked", "init", "steps"), CASES)
def test_both_passes_are_those_of_the_reference(shape, masked, init, steps):
    shape = dict(SHAPES[shape])
    landmarks = shape.pop("landmarks")
    q, k, v = qkv(batch=4 if masked else 2, heads=1, **shape, device=DEVICE)
    mask = masks(k.shape[2]) if masked else None
    g = torch.randn(*q.shape[:3], v.shape[3], device=DEVICE)
    actual, expected = both_passes(q, k, v, mask, landmarks, steps, init, g)
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        # The inverse amplifies rounding, by up to 21 in six steps.
        assert relative_error(a, b) < 2e-5, name


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # rows not stored
def test_scores_that_are_all_very_negative_have_gradients():
    """A key that is not there has the score 0: far above the others."""
    q, k, v = qkv(batch=1, heads=1, queries=40, channels=16, device=DEVICE)
    q, k = (0.3 * x for x in (q, k))
    q[..., 0] += 22
    k[..., 0] -= 22  # scores of −121
    actual, expected = both_passes(q, k, v, None, 8, 2, "exact", torch.randn_like(v))
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        # Scores of 121 are off by 121 · 2⁻²³, so are their exponentials, relatively; dq, a
        # hundredth of dk here, is a difference of what has that error.
        assert relative_error(a, b) < 1e-3, name


@pytest.mark.parametrize("init", ["exact", "original"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_many_landmarks_go_through_torch(init, masked, monkeypatch):
    """Above the landmarks of one program, here six of them."""
    monkeypatch.setattr(kernels, "IN_ONE_PROGRAM", 5)
    q, k, v = qkv(batch=4, heads=1, queries=50, device=DEVICE)
    mask = masks(50) if masked else None
    actual, expected = both_passes(q, k, v, mask, 6, 6, init, torch.randn_like(v))
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a, b) < 2e-5, name


@pytest.mark.parametrize("landmarks", verbs.CONFIGS)
def test_every_configuration_of_the_iteration(landmarks):
    q, k, v = qkv(batch=1, heads=1, queries=landmarks + 20, device=DEVICE)
    actual, expected = both_passes(q, k, v, None, landmarks - 3, 2, "exact", torch.randn_like(v))
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a, b) < 2e-5, name


@pytest.mark.parametrize("landmarks", verbs.HELD_WARPS)
def test_the_inverse_in_registers_is_that_in_scratch(landmarks):
    """Where values are half precision; float32 takes the scratch, held to the reference above."""
    q, k, bv = qkv(batch=2, heads=2, queries=landmarks - 3, channels=32, device=DEVICE)
    scratch, held = (
        verbs.solve(q, k, bv, bv.to(dtype), None, None, None, 6, 0.2)
        for dtype in (torch.float32, torch.float16)
    )
    # Products of parts lose some 2^-21 each, and the inverse amplifies by up to 21 in six steps;
    # the result is rounded to float16, here and there to the other side.
    assert relative_error(held, scratch.half()) < 2e-4


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_inference_gives_the_same_output(masked):
    """Run, recorded and played: what is not kept is scratch."""
    for seed in range(3):
        q, k, v = qkv(batch=4, heads=2, queries=40, device=DEVICE, seed=seed)
        options = masks(40) if masked else None, 6, 2, False, 0.3
        (y,) = kernels.nystrom_forward(q, k, v, *options, False)
        assert torch.equal(y, kernels.nystrom_forward(q, k, v, *options, True)[0])


def test_more_heads_than_programs(monkeypatch):
    monkeypatch.setattr(verbs, "PROGRAMS", 2)
    q, k, v = qkv(batch=2, heads=3, queries=40, device=DEVICE)
    actual, expected = both_passes(q, k, v, None, 6, 1, "exact", torch.randn_like(v))
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a, b) < 2e-5, name


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("tokens", [3, 16, 99, 1000])
def test_segments_of_many_runs(tokens, masked, monkeypatch):
    """A program cuts a run of tokens, knowing how many valid ones there are before it."""
    monkeypatch.setattr(verbs, "RUN", 16)
    monkeypatch.setattr(verbs, "COUNTS", 2)
    mask = torch.rand(3, tokens, device=DEVICE) < torch.tensor([[0.1], [0.5], [0.9]], device=DEVICE)
    mask[0, : tokens // 2] = False  # whole runs without a token
    few = 7
    made = segments(mask if masked else None, 3, tokens, few, DEVICE)
    mask = mask if masked else torch.ones_like(mask)
    assert torch.equal(made.mask, mask)
    first, last, length = made.bounds
    assert torch.equal(length, mask.sum(-1))
    for b in range(3):
        valid = mask[b].nonzero()[:, 0]
        number = torch.arange(len(valid), device=DEVICE) * few // max(1, len(valid))
        assert torch.equal(made.segment[b][valid].long(), number)
        assert (made.segment[b][~mask[b]] == -1).all()
        for j in range(few):
            members = valid[number == j].tolist()
            assert made.sizes[b, j] == len(members)
            assert made.there[b, j] == bool(members)
            bounds = [members[0], members[-1] + 1] if members else [0, 0]
            assert [first[b, j].item(), last[b, j].item()] == bounds


@pytest.mark.parametrize("tokens", [1, 5, 6, 7, 23, 48])
def test_segments_are_those_of_the_reference(tokens):
    x, _, _ = qkv(batch=4, heads=2, queries=max(tokens, 9), device=DEVICE)
    x = x.half().float()
    mask = masks(x.shape[2])
    cut = segments(mask, 4, x.shape[2], tokens, x.device)
    means, sizes = segment_means(x.masked_fill(~mask[:, None, :, None], 0), mask, tokens)
    assert torch.equal(cut.sizes, sizes)
    (actual, _), (_, rounded) = verbs.segment_means(x, x.half(), tokens, cut.cut, cut.cut)
    torch.testing.assert_close(actual, means, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rounded, means.half(), rtol=2**-10, atol=2**-24)  # an ulp
    counts = torch.stack([(cut.segment == j).sum(-1) for j in range(tokens)], -1)
    assert torch.equal(counts, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (dict(queries=300, channels=64), dict(num_landmarks=64)),
        (dict(queries=2050, channels=64), dict(num_landmarks=64)),
        (dict(queries=130, keys=513, channels=17, value_channels=40), dict(num_landmarks=24)),
        (dict(queries=700, channels=64), dict(num_landmarks=64, init="original")),
        (dict(queries=700, channels=128), dict(num_landmarks=128)),
        (dict(queries=900, channels=64), dict(num_landmarks=256)),
        (dict(queries=1100, channels=32), dict(num_landmarks=512)),
        (dict(queries=400, channels=256), dict(num_landmarks=32)),
        (dict(queries=40, channels=64), dict(num_landmarks=64)),
    ],
    ids=["plain", "long", "cross-odd", "original", "wide", "256", "512", "widest", "alone"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_at_most_twice_as_wrong_as_the_reference(case, options, masked, dtype):
    held_to_the_reference(longspan.nystrom, case, masked, dtype, **options)


@pytest.mark.gpu
def test_fused_refuses_what_it_cannot_do():
    q, k, v = qkv(device="cuda")
    with pytest.raises(NotImplementedError, match=r"no fused kernel for more than 512 landmarks"):
        longspan.nystrom(q, k, v, num_landmarks=600, impl="fused")
    with pytest.raises(NotImplementedError, match=r"no fused kernel for torch.float64"):
        longspan.nystrom(q.double(), k.double(), v.double(), impl="fused")
