"""The GPU kernels of YOSO: compiled and interpreted anywhere, held to the reference on a GPU."""

import re

import pytest
import torch
from cases import allowed_errors, qkv, relative_error

import longspan
from longspan.attention import nvrtc, tape
from longspan.attention.base import unit
from longspan.attention.yoso import kernels, verbs, verbs_backward
from longspan.attention.yoso.hashing import hash_codes, projections
from longspan.attention.yoso.tables import apply_outer_sums

CPU = torch.device("cpu")


SOURCES = [
    (verbs.HASH, dict(D=64, BITS=8, X="BF16", PLANES=1)),
    (verbs.HASH, dict(D=128, BITS=11, X="F16", PLANES=2)),
    (verbs.HASH, dict(D=256, BITS=16, X="F32", PLANES=2)),
    (verbs.CODES, dict(BITS=8)),
    (verbs.CODES, dict(BITS=12)),
    (verbs.CODES, dict(BITS=16)),
    (verbs.TABLES, dict(D=64, BITS=8, X="BF16", TABLE="BF16", INDEX="uint16_t")),
    (verbs.TABLES, dict(D=80, BITS=12, X="F32", TABLE="F32", INDEX="uint32_t")),
    (verbs.TABLES, dict(D=256, BITS=16, X="F16", TABLE="F32", INDEX="uint16_t")),
    (verbs.TABLES, dict(D=8, BITS=1, X="BF16", TABLE="BF16", INDEX="uint16_t")),
    (verbs_backward.ROWS, dict(D=24, E=80, W=128, X="BF16")),
    (verbs_backward.ROWS, dict(D=64, E=64, W=64, X="F16")),
    (verbs_backward.OUTER, dict(W=64, INDEX="uint16_t", LIGHT=48, SUMS="F16")),
    (verbs_backward.OUTER, dict(W=64, INDEX="uint32_t", LIGHT=64, SUMS="F16")),
    (verbs_backward.OUTER, dict(W=64, INDEX="uint32_t", LIGHT=0, SUMS="F32")),
    (verbs_backward.OUTER, dict(W=128, INDEX="uint32_t", LIGHT=0, SUMS="F16")),
    (verbs_backward.OUTER, dict(W=128, INDEX="uint16_t", LIGHT=48, SUMS="F32")),
    (verbs_backward.OUTER, dict(W=128, INDEX="uint32_t", LIGHT=64, SUMS="F32")),
    (verbs.WALK, dict(D=64, E=64, BITS=12, X="BF16", INDEX="uint16_t")),
    (verbs.WALK, dict(D=64, E=128, BITS=10, X="F16", INDEX="uint32_t")),
    (verbs.WALK, dict(D=256, E=80, BITS=3, X="F32", INDEX="uint32_t")),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(("source", "defines"), SOURCES)
def test_the_sources_compile_without_a_gpu(arch, source, defines, tmp_path, monkeypatch):
    pytest.importorskip("cuda.core", reason="needs cuda-core, from the extra [cuda]")
    monkeypatch.setattr(nvrtc, "cache_folder", lambda: tmp_path / "cache")
    key = tuple(sorted(defines.items()))
    binary = nvrtc.compile_source(source, key, arch)
    assert binary.startswith(b"\x7fELF")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(b"from disk")
    assert nvrtc.compile_source(source, key, arch) == b"from disk"


@pytest.mark.parametrize("source", sorted(verbs.CUDA.glob("*.cu*")), ids=lambda path: path.name)
def test_no_lambda_is_generic(source):
    """Some releases of NVRTC take one for a function of the host, and compile nothing."""
    assert not re.search(r"\]\s*\([^()]*\bauto\b", source.read_text())


def test_a_cache_that_cannot_be_written_is_no_trouble(tmp_path):
    (tmp_path / "file").touch()
    nvrtc._keep(b"binary", tmp_path / "file" / "below" / "a.cubin")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_rows_that_do_not_lie_on_words_are_copied():
    aligned = torch.randn(2, 3, 5, 8)
    assert verbs.aligned(aligned) is aligned
    permuted = aligned.transpose(1, 2)
    assert verbs.aligned(permuted) is permuted
    shifted = torch.randn(2 * 3 * 5 * 8 + 1)[1:].view(2, 3, 5, 8)  # contiguous, four bytes off
    for x in (shifted, torch.randn(2, 3, 5, 9)[..., :8], torch.randn(2, 3, 8, 5).mT):
        copy = verbs.aligned(x)
        assert copy.data_ptr() % 16 == 0
        assert copy.is_contiguous()
        assert torch.equal(copy, x)


class Unlaunched:
    """Stands for a kernel that is launched, and notes its name."""

    def __init__(self, name):
        self.name = name

    def again(self, grid, arguments):
        return lambda bases, addresses: None


@pytest.fixture
def recorded(monkeypatch):
    """A function that runs one of the two passes without a GPU: results, and what it launches."""
    pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")

    def launcher(*_, **__):
        def launch(name, grid, block, *arguments, shared=0):
            tape.note(Unlaunched(name), grid, arguments)

        return launch

    for name in ("_tables", "_walk", "_hash", "_codes"):
        monkeypatch.setattr(verbs, name, launcher)
    for name in ("_launch_rows", "_outer"):
        monkeypatch.setattr(verbs_backward, name, launcher)
    monkeypatch.setattr(verbs_backward, "_cache_bytes", lambda device: 50 << 20)
    monkeypatch.setattr(verbs_backward, "_places", lambda device: 8 * 132)

    def record(run, *arguments):
        given = [x for x in arguments if isinstance(x, torch.Tensor)]
        with tape.Recorder(given) as recorder:
            results = run.__wrapped__(*arguments)
        return results, tape.Tape(recorder, given, results), [x.name for x, *_ in recorder.launches]

    def both(tokens, hash_bits, keep=True, dtype=torch.bfloat16):
        q, k, v = (torch.empty(1, 8, tokens, 64, dtype=dtype) for _ in range(3))
        options = None, None, 5, None, 32, hash_bits, True, keep
        forward = record(kernels.yoso_forward, q, k, v, *options)
        if not keep:
            return v, forward
        inputs = torch.empty_like(v), q, k, v, None, *forward[0]
        options = None, 5, hash_bits, 32, True, False, False
        return v, forward, record(kernels.yoso_backward, *inputs, *options)

    return both


def size(tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("tokens", [8192, 32768, 131072])
@pytest.mark.parametrize(("bits", "alone", "both"), [(8, 3, 8), (16, 4, 12)], ids=["8", "log2"])
def test_memory_of_both_passes(recorded, tokens, bits, alone, both):
    """Above inputs and outputs, in units of v: of a forward `alone`, and of `both` passes."""
    bits = min(bits, tokens.bit_length() - 1)
    v, (_, forward, _) = recorded(tokens, bits, keep=False)
    assert forward.scratch <= alone * size([v])
    v, ((_, *saved), *_), (_, backward, _) = recorded(tokens, bits)
    assert size(saved) + backward.scratch <= both * size([v])


FORWARD = ["gaussian_planes", "hash_codes"]
LONG_LISTS = ["bucket_lists_16k", "bucket_places", "bucket_merge_16"]
LONGEST_LISTS = [*LONG_LISTS[:2], "bucket_merge_32"]
FINE_LISTS = ["bucket_lists_16k", "bucket_refine_16"]
COLLIDE = ["bucket_sum_16", "bucket_gather"]


@pytest.mark.parametrize(
    ("tokens", "hash_bits", "forward", "backward"),
    [
        (4096, 8, ["bucket_lists_4k", *COLLIDE],
         ["bucket_lists_4k", "measure", *COLLIDE, "total", "pair_rows", "outer_both", "finish"]),
        (8192, 8, ["bucket_lists_16k", *COLLIDE],
         ["bucket_lists_16k", "measure", *COLLIDE, "total", "pair_rows", "outer_both", "finish"]),
        (16384, 8, ["bucket_lists_16k", *COLLIDE],
         ["bucket_lists_16k", "measure", *COLLIDE, "total", "pair_rows", "outer_tables", "finish"]),
        (32768, 8, ["bucket_lists_32k", *COLLIDE],
         ["bucket_lists_32k", "measure", *COLLIDE, "total", "pair_rows", "outer_tables", "finish"]),
        (65536, 8, [*LONG_LISTS, *COLLIDE],
         [*LONG_LISTS, "measure", *COLLIDE, "total", "pair_rows", "outer_tables", "finish"]),
        (131072, 8, [*LONGEST_LISTS, *COLLIDE],
         [*LONGEST_LISTS, "measure", *COLLIDE, "total", "pair_rows", "clear", "outer_phased",
          "outer_tables", "finish"]),
        (4096, 12, ["bucket_lists_4k", "heavy_sum", "walk_gather"],
         ["bucket_lists_4k", "measure", "heavy_sum", "total", "pair_rows", "outer_tables",
          "walk_outer"]),
        (65536, 16, [*FINE_LISTS, "heavy_sum", "walk_gather"],
         [*FINE_LISTS, "measure", "heavy_sum", "total", "pair_rows", "outer_tables", "walk_outer"]),
    ],
)  # fmt: skip
def test_what_is_launched(recorded, tokens, hash_bits, forward, backward):
    """By the size of buckets: pairs, tables or both, and walks where they are nearly empty."""
    _, (*_, first), (*_, second) = recorded(tokens, hash_bits)
    assert first == FORWARD + forward
    assert second == backward


@pytest.fixture
def triton():
    """The Triton verbs, in the interpreter where there is no GPU."""
    pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")
    from longspan.attention.yoso import triton

    return triton


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("both", [False, True], ids=["forward", "both-passes"])
@pytest.mark.parametrize("hashing", ["gaussian", "hadamard"])
@pytest.mark.parametrize(
    ("channels", "num_hashes", "hash_bits", "dtype"),
    [
        (64, 32, 8, torch.bfloat16),
        (16, 5, 8, torch.float32),
        (24, 7, 3, torch.float16),
        (40, 33, 11, torch.bfloat16),
        (128, 18, 12, torch.float16),
        (256, 6, 16, torch.float32),
    ],
)
def test_codes_are_those_of_the_reference(channels, num_hashes, hash_bits, dtype, hashing, both):
    device = torch.device("cuda")
    sizes = dict(queries=301, keys=140, channels=channels)
    q, k, _ = qkv(**sizes, dtype=dtype, device=device)
    planes = projections(hashing, 7, 3, channels, num_hashes, hash_bits, device)
    pieces = verbs.plane_pieces(planes)
    if hashing == "gaussian":  # as bfloat16 holds them
        made = verbs.gaussian_planes(7, 3, channels, num_hashes, hash_bits, device)
        assert torch.equal(made, pieces[:, :1])
        pieces = made
    q_token, k_hash, *more = verbs.hash_codes(q, k, pieces, both=both)
    assert len(more) == 2 * both
    by_hash = [q_token.int().mT, k_hash.int()]
    if both:
        assert torch.equal(more[0].int(), by_hash[0])
        assert torch.equal(more[1].int().mT, by_hash[1])
    for x, codes in zip((q, k), by_hash, strict=True):
        expected = hash_codes(x.double(), planes)
        # A bit may differ where a projection is within rounding of zero. The two pieces of a plane
        # have 16 digits: of some 10⁴ codes, hardly one. Laid out wrong, nearly all would differ.
        assert (codes != expected).double().mean() < 1e-4


def lists(codes, buckets):
    """What `kernels.bucket_lists` makes, by sorting."""
    codes, order = codes.sort(dim=-1, stable=True)
    edges = torch.arange(buckets + 1, device=codes.device).expand(*codes.shape[:3], -1)
    return order.int(), torch.searchsorted(codes, edges.contiguous()).int()


@pytest.mark.parametrize("spread", [4, 1], ids=["light-buckets", "one-heavy-bucket"])
@pytest.mark.parametrize("room", [1 << 20, 1], ids=["all-heads", "head-by-head"])
@pytest.mark.parametrize("width", [16, 80])
def test_outer_sums_are_those_of_the_reference(triton, device, spread, room, width):
    shape = dict(batch=1, heads=2, queries=50, keys=70, channels=24, value_channels=width)
    q, k, v = qkv(**shape, device=device)
    g = torch.randn(1, 2, 50, width, device=device)
    cq, ck = (torch.randint(spread, (1, 2, 3, n), device=device) for n in (50, 70))
    ck[0, 0, 0] = 3 if spread > 1 else 0  # a hash where some queries meet no key
    actual = triton.outer_sums(q, k, v, g, None, lists(cq, 4), lists(ck, 4), 0.5, 2, room)
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    q_unit, k_unit = (unit(x) for x in leaves)
    cq, ck = cq[:, :, :2], ck[:, :, :2]  # of three
    dq = apply_outer_sums(cq, ck, 4, k_unit.detach(), v, g)
    dk = apply_outer_sums(ck, cq, 4, q_unit.detach(), g, v)
    expected = torch.autograd.grad((q_unit, k_unit), leaves, (0.5 * dq, 0.5 * dk))
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < 1e-5


def test_row_verbs(triton, device):
    x, g, _ = qkv(queries=21, channels=24, device=device)
    x[0, 0, 3] = 0
    x[1, :, 7] = torch.nan
    mask = torch.ones(2, 21, dtype=torch.bool, device=device)
    mask[1, 7] = False
    norms = triton.norms(x, mask)
    x = x.masked_fill(~mask[:, None, :, None], 0)
    torch.testing.assert_close(norms, x.norm(dim=3))
    leaf = x.clone().requires_grad_()
    u = unit(leaf)
    (expected,) = torch.autograd.grad(u, leaf, g)
    inverse = torch.where(norms > 0, 1 / norms, 0)
    actual = triton.through_unit(g, u.detach(), inverse)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


SHAPES = {
    "plain": dict(queries=300, channels=64, hash_bits=8),
    "cross-odd": dict(queries=130, keys=513, channels=17, value_channels=40, hash_bits=8),
    "many-tokens": dict(queries=5000, keys=6000, channels=64, hash_bits=8),
    "many-pairs": dict(queries=5000, keys=4000, channels=64, hash_bits=7),
    "two-digit-codes": dict(queries=5000, keys=3000, channels=64, hash_bits=12),
    "two-digit-codes-far": dict(heads=1, queries=20000, keys=9000, channels=16, hash_bits=12),
    "more-digit-codes-far": dict(heads=1, queries=20000, keys=9000, channels=16, hash_bits=14),
    # Hardly a query meets a key: of few that do, errors would be left to chance.
    "more-buckets-than-tokens": dict(heads=16, queries=100, keys=70, channels=64, hash_bits=16),
    "heavy-buckets": dict(heads=1, queries=20000, channels=64, hash_bits=1),
    "walked": dict(queries=400, keys=300, channels=64, value_channels=40, hash_bits=9),
    "walked-wide": dict(queries=400, channels=128, hash_bits=11),
    "wide": dict(queries=700, channels=128, value_channels=96, hash_bits=6),
    "wide-many-pairs": dict(queries=5000, keys=4000, channels=128, hash_bits=7),
    "wide-tables": dict(queries=3000, channels=96, value_channels=128, hash_bits=5),
    "widest": dict(queries=700, channels=256, hash_bits=6),
    "narrow": dict(queries=700, channels=16, hash_bits=4),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "sum"])
@pytest.mark.parametrize("dtype", list(verbs.TYPES), ids=lambda t: str(t).removeprefix("torch."))
def test_at_most_twice_as_wrong_as_the_reference(case, masked, dtype, normalize):
    """Against float64: the kernel, and the reference in the same dtype."""
    case = {"batch": 2, "heads": 2, **case}
    options = dict(hash_bits=case.pop("hash_bits"), num_hashes=6, seed=5, normalize=normalize)
    q, k, v = qkv(**case, dtype=dtype, device="cuda")
    if masked:
        options["key_mask"] = torch.rand(2, k.shape[2], device="cuda") < 0.7
    g = torch.randn(*q.shape[:3], v.shape[3], device="cuda").to(dtype)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    y = longspan.yoso(*leaves, impl="fused", **options)
    results = [y.detach(), *torch.autograd.grad(y, leaves, g)]
    for x, (name, exact, allowed) in zip(
        results, allowed_errors(q, k, v, g, **options), strict=True
    ):
        assert (x.double() - exact).norm() <= allowed, (name, relative_error(x, exact))


TRUE_SHAPES = {
    "plain": dict(queries=300, channels=64, hash_bits=8),
    "cross-odd": dict(queries=130, keys=213, channels=17, value_channels=40, hash_bits=9),
    "more-buckets-than-tokens": dict(queries=100, keys=70, channels=64, hash_bits=16),
    "widest": dict(queries=200, channels=256, value_channels=80, hash_bits=8),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", TRUE_SHAPES.values(), ids=TRUE_SHAPES.keys())
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("dtype", list(verbs.TYPES), ids=lambda t: str(t).removeprefix("torch."))
def test_the_true_gradient_of_light_buckets_is_that_of_the_reference(case, masked, dtype):
    """With up to 16 tokens a bucket, every pair is looked at."""
    case = {"batch": 2, "heads": 2, **case}
    options = dict(hash_bits=case.pop("hash_bits"), num_hashes=6, seed=5, gradient="true")
    q, k, v = qkv(**case, dtype=dtype, device="cuda")
    if masked:
        options["key_mask"] = torch.rand(2, k.shape[2], device="cuda") < 0.7
    g = torch.randn(*q.shape[:3], v.shape[3], device="cuda").to(dtype)
    results = []
    for impl in ("fused", "reference"):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        y = longspan.yoso(*leaves, impl=impl, normalize=False, **options)
        results.append(torch.autograd.grad(y, leaves, g))
    for fused, plain in zip(*results, strict=True):
        # Both round once on the way out; float32 is also summed in another order.
        assert relative_error(fused, plain) < 2 * torch.finfo(dtype).eps + 1e-5


@pytest.mark.gpu
def test_the_true_gradient_of_heavy_buckets_is_right_on_average():
    """Copies of one sequence in a batch share hashes, and draw from full buckets independently."""
    copies = 512
    q, k, v = (x.expand(copies, -1, -1, -1) for x in qkv(batch=1, queries=90, device="cuda"))
    g = torch.randn(1, *v.shape[1:], device="cuda").expand(copies, -1, -1, -1)
    options = dict(hash_bits=1, num_hashes=4, seed=5, gradient="true", normalize=False)
    results = []
    for impl, some in (("fused", slice(None)), ("reference", slice(1))):
        leaves = [x[some].contiguous().requires_grad_() for x in (q, k, v)]
        y = longspan.yoso(*leaves, impl=impl, **options)
        results.append(torch.autograd.grad(y, leaves, g[some]))
    for fused, plain in zip(*results, strict=True):
        spread = relative_error(fused[:1], plain)
        assert relative_error(fused.mean(0, keepdim=True), plain) < 1e-5 + 3 * spread / copies**0.5


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(verbs.TYPES), ids=lambda t: str(t).removeprefix("torch."))
def test_the_true_gradient_is_finite_where_query_and_key_are_equal(dtype):
    q, _, v = (x.requires_grad_() for x in qkv(queries=50, dtype=dtype, device="cuda"))
    y = longspan.yoso(q, q, v, seed=5, gradient="true", impl="fused")
    assert all(x.isfinite().all() for x in torch.autograd.grad(y.float().square().sum(), (q, v)))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1e-20, 1e-8, 1e8])
def test_the_size_of_gradients_and_values_does_not_matter(size):
    """dq and dk are summed in float16, whose range is small."""
    q, k, v = (x.requires_grad_() for x in qkv(queries=500, dtype=torch.bfloat16, device="cuda"))
    g = torch.randn_like(v)
    y = longspan.yoso(q, k, v, seed=5, impl="fused", normalize=False)
    expected = torch.autograd.grad(y, (q, k), g, retain_graph=True)
    # Both sides round to bfloat16 and add in float16 in their own order, some 3e-3 each; a sum that
    # left the range of float16 would be infinite or lose most of its digits.
    for grad, wanted in zip(torch.autograd.grad(y, (q, k), g * size), expected, strict=True):
        assert relative_error(grad.float() / size, wanted) < 1e-2
    outlier = torch.where(torch.arange(500, device="cuda") == 3, 1000.0, 1.0)[:, None]
    results = []
    for impl in ("fused", "reference"):
        y = longspan.yoso(q, k, v * outlier.to(v.dtype), seed=5, impl=impl, normalize=False)
        results.append(torch.autograd.grad(y, (q, k), g))
    for grad, wanted in zip(*results, strict=True):
        rest = torch.arange(500, device="cuda") != 3
        assert relative_error(grad[:, :, rest], wanted[:, :, rest]) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("tokens", [40, 3000], ids=["walked", "in-tables"])
def test_one_token_may_hold_all_of_the_gradient(tokens, dtype):
    """As where a classifier reads the first token: it meets its own key in every hash."""
    q, _, v = (x.requires_grad_() for x in qkv(queries=tokens, dtype=dtype, device="cuda"))
    g = torch.zeros_like(v)
    g[:, :, 0, 5] = 1
    results = []
    for impl in ("fused", "reference"):
        y = longspan.yoso(q, q, v, seed=5, impl=impl, normalize=False)
        results.append(torch.autograd.grad(y, (q, v), g))
    for fused, plain in zip(*results, strict=True):  # tolerance as above
        assert relative_error(fused, plain) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(verbs.TYPES), ids=lambda t: str(t).removeprefix("torch."))
def test_fewer_hashes_in_the_backward(dtype):
    q, k, v = (x.requires_grad_() for x in qkv(queries=400, dtype=dtype, device="cuda"))
    results = []
    for impl in ("fused", "reference"):
        y = longspan.yoso(q, k, v, seed=5, impl=impl, num_hashes=8, backward_hashes=3)
        results.append(torch.autograd.grad(y.sum(), (q, k, v)))
    for fused, plain in zip(*results, strict=True):
        # Twice the reference's rounding, as above, and its own once. A hash too many or too few
        # would be off by a third.
        assert relative_error(fused, plain) < 3 * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("asked", [True, False], ids=["all-when-asked-for", "y-and-dv-always"])
@pytest.mark.parametrize("hash_bits", [8, 14], ids=["tables", "walked"])
def test_the_same_bits(hash_bits, asked, dtype):
    q, k, v = (x.requires_grad_() for x in qkv(queries=3000, dtype=dtype, device="cuda"))
    torch.use_deterministic_algorithms(asked)
    try:
        runs = []
        for _ in range(3):
            y = longspan.yoso(q, k, v, seed=5, hash_bits=hash_bits, impl="fused")
            runs.append((y, *torch.autograd.grad(y, (v, q, k), torch.ones_like(y))))
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        same = [torch.equal(a, b) for a, b in zip(run, runs[0], strict=True)]
        assert all(same if asked else same[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("hash_bits", [8, 12], ids=["tables", "walked"])
def test_call_after_call_without_a_pause(hash_bits):
    """Memory of one call is that of the next before its kernels are done."""
    sets = [qkv(queries=2000, dtype=torch.bfloat16, device="cuda", seed=i) for i in range(3)]
    sets = [[x.requires_grad_() for x in inputs] for inputs in sets]

    def call(inputs):
        y = longspan.yoso(*inputs, seed=5, hash_bits=hash_bits, impl="fused")
        return y, *torch.autograd.grad(y, inputs[2:], torch.ones_like(y))

    first = []
    for inputs in sets:
        first.append(call(inputs))
        torch.cuda.synchronize()
    for _ in range(20):
        for results, wanted in zip([call(inputs) for inputs in sets], first, strict=True):
            assert all(map(torch.equal, results, wanted))


@pytest.mark.gpu
def test_beyond_32_bits_of_buckets():
    q, k, v = qkv(batch=1, heads=64, queries=3000, channels=16, device="cuda")
    options = dict(num_hashes=140, hash_bits=12, seed=1)
    assert 64 * 140 * 2**12 * 16 * 4 > 2**31
    fused, plain = (longspan.yoso(q, k, v, impl=i, **options) for i in ("fused", "reference"))
    # Among 6 · 10⁸ projections some are within rounding of zero, and their codes may differ.
    assert relative_error(fused, plain) < 1e-3


@pytest.mark.gpu
def test_a_cuda_graph_replays_with_new_inputs_and_streams_are_respected():
    q, k, v = qkv(queries=500, channels=64, dtype=torch.bfloat16, device="cuda")
    attend = lambda: longspan.yoso(q, k, v, seed=3, impl="fused")  # noqa: E731
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attend()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attend()
    v.mul_(-2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, attend())


@pytest.mark.gpu
def test_a_seed_on_the_cpu_and_values_off_their_words():
    q, k, v = qkv(queries=100, channels=16, device="cuda")
    shifted = torch.empty(v.numel() + 1, device="cuda")[1:].view(v.shape).copy_(v)
    y = longspan.yoso(q, k, shifted, seed=torch.tensor(3), impl="fused")
    assert torch.equal(y, longspan.yoso(q, k, v, seed=3, impl="fused"))


@pytest.mark.gpu
def test_fused_refuses_what_it_cannot_do():
    q, k, v = qkv(device="cuda", dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"yoso has no fused kernel for torch.float64"):
        longspan.yoso(q, k, v, impl="fused")
    wide = torch.randn(1, 1, 9, 264, device="cuda")
    with pytest.raises(NotImplementedError, match="for more than 256 channels"):
        longspan.yoso(wide, wide, wide, impl="fused")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_phases_give_the_same_gradients(dtype, monkeypatch):
    """Tables that are built before any is applied: as for sequences larger than the cache."""
    q, k, v = qkv(batch=1, heads=2, queries=4999, channels=64, dtype=dtype, device="cuda")
    k[:, :, :2000] = k[:, :, :1]  # a bucket of many more tokens than the others
    leaves = [x.requires_grad_() for x in (q, k, v)]
    monkeypatch.setattr(verbs_backward, "MANY_RUNS", 16)
    launched, found, real = [], [], verbs_backward._outer

    def noted(*kind):
        return lambda name, *arguments: (launched.append(name), real(*kind)(name, *arguments))

    monkeypatch.setattr(verbs_backward, "_outer", noted)
    for cache in (1 << 40, 0):
        monkeypatch.setattr(verbs_backward, "_cache_bytes", lambda device, cache=cache: cache)
        y = longspan.yoso(q, k, v, num_hashes=4, hash_bits=4, seed=3, impl="fused")
        found.append(torch.autograd.grad(y.float().square().sum(), leaves))
    for a, b in zip(*found, strict=True):
        assert relative_error(a, b) < 4e-3  # sums of float16 in another order, then bfloat16
    assert launched == ["outer_tables", "clear", "outer_phased", "outer_tables"]
