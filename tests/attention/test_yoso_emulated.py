"""YOSO's CUDA kernels on a CPU, through `emulator`: both passes, held to the reference."""

import emulator
import pytest
import torch
from cases import allowed_errors, qkv, relative_error

import longspan
from longspan.attention import tape
from longspan.attention.base import unit
from longspan.attention.yoso import kernels, verbs, verbs_backward
from longspan.attention.yoso.hashing import hash_codes, projections

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=str(emulator.missing()))


@pytest.fixture(autouse=True)
def launched():
    """The names of what was launched, so that a test can say which kernels it is of."""
    names = []

    def launcher(source, **defines):
        run = emulator.launcher(source, **defines)

        def launch(name, *arguments, **options):
            names.append(name)
            run(name, *arguments, **options)

        return launch

    with emulator.installed(launcher):
        yield names


# As they are run when they are first called: not from a tape, which launches by itself.
FORWARD, BACKWARD = kernels.yoso_forward.__wrapped__, kernels.yoso_backward.__wrapped__


def both_passes(q, k, v, g, mask, hashes, bits, hashing="gaussian", gradient="surrogate"):
    """Output and gradients of the kernels, and of the reference in float32."""
    planes = None
    if hashing != "gaussian":
        planes = projections(hashing, 7, q.shape[1], q.shape[3], hashes, bits, q.device)
    y, *kept = FORWARD(q, k, v, mask, None, 7, planes, hashes, bits, True, True)
    grads = BACKWARD(
        g, q, k, v, mask, y, *kept, None, 7, bits, hashes, True, gradient == "true", False
    )
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    options = dict(num_hashes=hashes, hash_bits=bits, hashing=hashing, gradient=gradient, seed=7)
    want = longspan.yoso(*leaves, key_mask=mask, impl="reference", **options)
    return [y, *grads], [want, *torch.autograd.grad(want, leaves, g.float())]


@pytest.fixture(params=emulator.SCHEDULES)
def schedule(request, monkeypatch):
    """Runs a test with the threads of a block in several orders."""
    monkeypatch.setattr(emulator, "schedule", emulator.SCHEDULES[request.param])


CASES = {  # shape, hashes, bits, and a kernel that it is of
    "pairs-cross-odd": (
        dict(queries=70, keys=50, channels=24, value_channels=40), 5, 3, "outer_both",
    ),
    "pairs-and-tables": (dict(queries=150, channels=64), 2, 2, "outer_both"),
    "tables": (dict(queries=600, channels=16), 2, 2, "outer_tables"),
    "walked": (dict(queries=60, channels=64), 3, 7, "walk_outer"),
    "wide-pairs-cross-odd": (
        dict(queries=70, keys=50, channels=80, value_channels=128), 5, 3, "outer_pairs",
    ),
    "wide-pairs-and-tables": (dict(queries=150, channels=128), 2, 2, "outer_pairs"),
    "wide-tables": (dict(queries=300, channels=80, value_channels=128), 2, 2, "outer_tables"),
    "few-queries": (dict(queries=12, keys=90, channels=16), 2, 3, "walk_gather"),
}  # fmt: skip


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize(("shape", "hashes", "bits", "kernel"), CASES.values(), ids=CASES.keys())
def test_both_passes(shape, hashes, bits, kernel, masked, schedule, launched):
    q, k, v = qkv(batch=1, heads=2, **shape, dtype=torch.bfloat16)
    mask = torch.rand(1, k.shape[2]) < 0.7 if masked else None
    g = torch.randn(1, 2, q.shape[2], v.shape[3]).bfloat16()
    actual, expected = both_passes(q, k, v, g, mask, hashes, bits)
    assert kernel in launched
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        # Results are rounded to bfloat16, by 2^-9 at most, and so are tables and the gradient of y.
        assert relative_error(a, b) < 6e-3, name


# Where hardly a query meets a key, dq and dk are what rounding leaves of zero.
LONELY = {"lonely": (dict(queries=60, keys=40, channels=64), 5, 14, "walk_outer")}


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("shape", "hashes", "bits", "kernel"),
    (CASES | LONELY).values(), ids=(CASES | LONELY).keys(),
)  # fmt: skip
def test_at_most_twice_as_wrong_as_the_reference(
    shape, hashes, bits, kernel, dtype, normalize, masked, launched
):
    q, k, v = qkv(batch=1, heads=2, **shape, dtype=dtype)
    mask = None
    if masked:
        mask = torch.rand(1, k.shape[2]) < 0.7
        k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    g = torch.randn(1, 2, q.shape[2], v.shape[3]).to(dtype)
    y, *kept = FORWARD(q, k, v, mask, None, 7, None, hashes, bits, normalize, True)
    grads = BACKWARD(g, q, k, v, mask, y, *kept, None, 7, bits, hashes, normalize, False, False)
    assert kernel in launched
    options = dict(num_hashes=hashes, hash_bits=bits, key_mask=mask, normalize=normalize, seed=7)
    expected = allowed_errors(q, k, v, g, **options)
    for x, (name, exact, allowed) in zip([y, *grads], expected, strict=True):
        assert (x.double() - exact).norm() <= allowed, (name, relative_error(x, exact))


@pytest.mark.parametrize(
    ("tokens", "channels", "kernel"),
    [
        (128, 64, "outer_both"), (128, 128, "outer_pairs"),
        (1024, 64, "outer_tables"), (1024, 128, "outer_tables"), (1024, 64, "outer_phased"),
    ],
    ids=["pairs", "wide-pairs", "tables", "wide-tables", "phases"],
)  # fmt: skip
def test_scores_and_tables_have_more_digits_than_float16(
    tokens, channels, kernel, launched, monkeypatch
):
    """Unit vectors and factors are float16 numbers here, so that only the result is rounded."""
    if kernel == "outer_phased":
        monkeypatch.setattr(verbs_backward, "_cache_bytes", lambda device: 0)
        monkeypatch.setattr(verbs_backward, "MANY_RUNS", 4)
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, tokens, 64).sign().half() for _ in range(2))
    v, g = (1.5 * unit(torch.randn(1, 2, tokens, channels)).half() for _ in range(2))
    y, *kept = FORWARD(q, k, v, None, None, 7, None, 2, 2, False, True)
    grads = BACKWARD(g, q, k, v, None, y, *kept, None, 7, 2, 2, False, False, False)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    options = dict(num_hashes=2, hash_bits=2, normalize=False, seed=7, impl="reference")
    exact = torch.autograd.grad(longspan.yoso(*leaves, **options), leaves, g.double())
    assert kernel in launched
    for name, a, b in zip(("dq", "dk", "dv"), grads, exact, strict=True):
        # Scores or tables in float16 would add as much again: 1.4 times.
        assert relative_error(a, b) < 1.1 * relative_error(b.half(), b), name


@pytest.mark.parametrize("bits", [5, 8, 12])
@pytest.mark.parametrize("hashes", [6, 8, 20, 36])
@pytest.mark.parametrize("tokens", [(70, 264), (301, 33)], ids=["in-words", "odd"])
def test_codes(tokens, hashes, bits, schedule):
    """By token and by hash, with several a store where they lie on words."""
    q, k, _ = qkv(batch=1, heads=2, queries=tokens[0], keys=tokens[1], channels=40)
    q, k = q.bfloat16(), k.bfloat16()
    planes = projections("gaussian", 7, 2, 40, hashes, bits, q.device).bfloat16()
    made = verbs.gaussian_planes(7, 2, 40, hashes, bits, q.device)
    q_token, k_hash, q_hash, k_token = verbs.hash_codes(q, k, made, both=True)
    for x, by_token, by_hash in ((q, q_token, q_hash), (k, k_token, k_hash)):
        assert torch.equal(by_token.int().mT, by_hash.int())
        # Sums of 40 products in float32, in two orders, differ by some 2^-22: where one is as near
        # to zero, a sign may differ, in one code of 10⁵. Laid out wrong, nearly all would.
        assert (by_hash.int() != hash_codes(x.float(), planes.float())).float().mean() < 1e-3


@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize(
    ("tokens", "bits", "crowded"),
    [
        (700, 4, False), (300, 12, False), (300, 12, True), (5000, 10, False), (9000, 6, False),
        (9001, 10, True), (17_000, 8, True), (33_000, 5, False), (16_500, 9, True),
        (300, 13, False), (5001, 14, True), (33_001, 15, False), (66_000, 16, True),
    ],
)  # fmt: skip
def test_lists(tokens, bits, crowded, masked, schedule):
    """By bucket, all that are not masked, with their beginnings and the most in one."""
    codes = torch.randint(1 << bits, (2, 2, 1, tokens))
    if crowded:
        codes[..., ::3] = (1 << bits) - 2
    mask = torch.rand(2, tokens) < 0.7 if masked else None
    dtype = torch.uint8 if bits <= 8 else torch.uint16
    order, first, most = verbs.bucket_lists(codes.to(dtype), mask, bits)
    for b in range(2):
        for h in range(2):
            mine = codes[b, h, 0]
            there = torch.arange(tokens) if mask is None else mask[b].nonzero()[:, 0]
            found = order[b, h, 0, : len(there)].long()
            found = (mine[found] * tokens + found).sort()[0] % tokens  # any order in a bucket
            assert torch.equal(found, there[mine[there].sort(stable=True)[1]])
            counts = mine[there].bincount(minlength=1 << bits)
            assert first[b, h, 0].tolist() == [0, *counts.cumsum(0).tolist()]
            assert int(most[b, h, 0]) == counts.max()


@pytest.mark.parametrize("bits", [2, 6], ids=["pairs-and-tables", "walked"])
def test_played_is_as_run(bits):
    """Run, recorded and played on other tensors: the emulator adds in one order, so bits agree."""
    ops = FORWARD, BACKWARD
    played = [tape.played(run) for run in ops]
    for seed in range(3):
        q, k, v = qkv(batch=1, heads=2, queries=90, channels=16, dtype=torch.bfloat16, seed=seed)
        results, number = [], tape.Number(1000 + seed)
        for forward, backward in (ops, played):
            y, *kept = forward(q, k, v, None, None, number, None, 3, bits, True, True)
            grads = backward(v, q, k, v, None, y, *kept, None, number, bits, 3, True, False, False)
            results.append([y, *grads])
        for name, one, other in zip(("y", "dq", "dk", "dv"), *results, strict=True):
            assert torch.equal(one, other), name


@pytest.mark.parametrize(
    ("keys", "bits", "kernel"),
    [
        (20_001, 3, "bucket_lists_32k"),
        (8300, 9, "bucket_lists_32k"),
        (33_000, 3, "bucket_merge_16"),
        (16_500, 9, "bucket_merge_16"),
        (66_000, 3, "bucket_merge_32"),
        (5000, 13, "bucket_refine_16"),
        (66_000, 13, "bucket_refine_32"),
    ],
    ids=[
        "large", "large-sparse", "merged", "merged-sparse", "merged-long", "refined",
        "refined-long",
    ],
)  # fmt: skip
def test_lists_of_many_tokens(keys, bits, kernel, launched):
    """As many as a block can sort, more than that, and more than 16 bits can tell apart."""
    q, k, v = qkv(batch=1, heads=1, queries=20, keys=keys, channels=16, dtype=torch.bfloat16)
    mask = torch.rand(1, keys) < 0.7
    (y,) = FORWARD(q, k, v, mask, None, 7, None, 1, bits, True, False)
    options = dict(num_hashes=1, hash_bits=bits, seed=7, impl="reference")
    expected = longspan.yoso(q.float(), k.float(), v.float(), key_mask=mask, **options)
    assert kernel in launched
    assert relative_error(y, expected) < 6e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_tables_in_phases(dtype, monkeypatch, schedule, launched):
    """As where the L2 cache has no room for a side of a head."""
    monkeypatch.setattr(verbs_backward, "_cache_bytes", lambda device: 0)
    monkeypatch.setattr(verbs_backward, "MANY_RUNS", 4)
    q, k, v = qkv(batch=1, heads=2, queries=600, channels=16, dtype=dtype)
    k[:, 0, :150] = k[:, 0, :1]  # a bucket that is too full for it
    actual, expected = both_passes(q, k, v, torch.randn_like(v), None, 2, 2)
    assert "outer_phased" in launched
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a, b) < (6e-3 if dtype == torch.bfloat16 else 6e-4), name


@pytest.mark.parametrize("bits", [2, 6], ids=["in-tables", "walked"])
def test_a_bucket_with_half_of_the_keys(bits, schedule):
    q, k, v = qkv(batch=1, heads=1, queries=90, channels=16, dtype=torch.bfloat16)
    k[:, :, ::2] = k[:, :, :1]
    actual, expected = both_passes(q, k, v, torch.randn_like(v), None, 3, bits)
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a, b) < 6e-3, name


def test_runs_without_a_pair(schedule, launched):
    """All keys of a head in buckets too full for pairs: warps take runs until one has some."""
    q, k, v = qkv(batch=1, heads=2, queries=120, channels=128, dtype=torch.bfloat16)
    k[:, 0, ::2], k[:, 0, 1::2] = k[:, 0, :1].clone(), k[:, 0, 1:2].clone()
    actual, expected = both_passes(q, k, v, torch.randn_like(v), None, 8, 2)
    assert {"outer_pairs", "outer_tables"} < set(launched)
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a, b) < 6e-3, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [2, 6], ids=["in-tables", "walked"])
def test_a_gradient_that_is_not_a_number_is_seen(bits, dtype):
    """By who scales gradients; what became zero would be trained on."""
    q, k, v = qkv(batch=1, heads=2, queries=90, channels=16, dtype=dtype)
    g = torch.randn_like(v)
    g[0, 0, 3, 2] = float("nan")
    (_, *grads), _ = both_passes(q, k, v, g, None, 3, bits)
    for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
        assert x[:, 0].isnan().any(), name
        assert x[:, 1].isfinite().all(), name


@pytest.mark.parametrize("bits", [2, 6], ids=["in-tables", "walked"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_the_true_gradient_of_light_buckets(dtype, bits, schedule):
    """Of buckets that need no drawing: what is left to chance is the codes alone."""
    q, k, v = qkv(batch=1, heads=1, queries=20, keys=14, channels=16, dtype=dtype)
    g = torch.randn_like(q)
    actual, expected = both_passes(q, k, v, g, None, 3, bits, "hadamard", gradient="true")
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        # Twice float16's rounding of results and tables, 2^-11 each; float32's, over some 60 terms.
        assert relative_error(a, b) < (2e-3 if dtype == torch.float16 else 1e-5), name


def test_threads_that_wait_for_each_other_are_found(tmp_path, capfd):
    """The emulator would not hide a barrier that a part of a block never reaches."""
    source = tmp_path / "waits.cu"
    source.write_text(
        '#include "ptx.cuh"\n'
        'extern "C" __global__ void waits(int64_t n) {\n'
        "  if (threadIdx.x < n) __syncthreads();\n"
        "  else __syncwarp();\n"
        "}\n"
    )
    run = emulator.launcher(source)
    run("waits", 1, 64, 64)
    run("waits", 1, 64, 32)  # the second warp ends, and is waited for no more
    child = emulator.apart(run, "waits", 1, 64, 40)
    assert child != 0
    assert "wait for each other" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("bits", "gradient"),
    [(2, "surrogate"), (10, "surrogate"), (10, "true")],
    ids=["in-pairs", "walked", "true"],
)
def test_float16_has_room_for_gradients_divided_by_norms(bits, gradient):
    q, k, v = (x.half() for x in qkv(batch=1, heads=1, queries=60, channels=16))
    v, g = v * 0.02, 100 * torch.randn(1, 1, 60, 16).half()
    actual, expected = both_passes(q, k, v, g, None, 32, bits, gradient=gradient)
    # Outputs are short, and g over their norms is beyond 65,504. Results are rounded to float16,
    # 2⁻¹¹ each; four of these.
    for name, a, b in zip(("y", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a.float(), b) < 2e-3, name
