"""The GPU kernels of YOSO: compiled and interpreted anywhere, held to the reference on a GPU."""

import pytest
import torch
from cases import qkv, relative_error

import longspan
from longspan.attention import nvrtc
from longspan.attention.base import unit
from longspan.attention.yoso import kernels, verbs
from longspan.attention.yoso.hashing import hash_codes, projections
from longspan.attention.yoso.tables import apply_outer_sums

CPU = torch.device("cpu")


SOURCES = [
    (verbs.CODES, dict(BITS=8)),
    (verbs.CODES, dict(BITS=16)),
    (verbs.TABLES, dict(D=64, BITS=8, X="BF16", TABLE="BF16", INDEX="uint16_t")),
    (verbs.TABLES, dict(D=80, BITS=12, X="F32", TABLE="F32", INDEX="uint32_t")),
    (verbs.TABLES, dict(D=256, BITS=16, X="F16", TABLE="F32", INDEX="uint16_t")),
    (verbs.TABLES, dict(D=8, BITS=1, X="BF16", TABLE="BF16", INDEX="uint16_t")),
    (verbs.OUTER, dict(W=64, INDEX="uint16_t")),
    (verbs.OUTER, dict(W=128, INDEX="uint32_t")),
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


@pytest.fixture
def triton():
    """The Triton verbs, in the interpreter where there is no GPU."""
    pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")
    from longspan.attention.yoso import triton

    return triton


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("channels", "hash_bits"), [(16, 8), (24, 3), (40, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("hashing", ["gaussian", "hadamard"])
def test_codes_are_those_of_the_reference(triton, device, channels, hash_bits, dtype, hashing):
    x, _, _ = qkv(queries=37, channels=channels, dtype=dtype, device=device)
    planes = projections(hashing, 7, 3, channels, 5, hash_bits, torch.device(device))
    tiles = verbs.plane_tiles(planes)
    if device == "cpu":  # Triton's interpreter has no bfloat16
        tiles = tiles.float().sum(1, keepdim=True)
    by_token, by_hash = triton.hash_codes(x, tiles, hash_bits)
    # Bits may differ where a projection is within rounding of zero: here, nowhere.
    assert torch.equal(by_hash.int(), hash_codes(unit(x.float()), planes))
    assert torch.equal(by_token.int().mT, by_hash.int())


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


def test_rows_to_and_from_the_scale_of_float16(triton, device):
    """What `pair_rows` takes out of the numbers, `finish` gives back."""
    x, a, _ = qkv(queries=21, channels=64, device=device)
    a *= 1e-8  # as gradients can be
    norms, total = a.norm(dim=3), a.norm(dim=3).sum(2)
    rows = triton.pair_rows(a, x, norms, total, 1000.0, 64)
    expected = unit(a), unit(x) * (norms * 1000 / total[..., None])[..., None]
    for actual, wanted in zip(rows.split(64, dim=3), expected, strict=True):
        assert relative_error(actual, wanted) < 2**-11
    # Columns as the kernel leaves them: 8 a + 2 b + c of every 32 for 8 b + 2 a + c.
    sums = torch.randn(*x.shape, device=device).half()
    plain = sums.float().unflatten(3, (2, 4, 4, 2)).transpose(4, 5).flatten(3)
    leaf = x.clone().requires_grad_()
    plain = plain * (norms * total[..., None])[..., None]
    (expected,) = torch.autograd.grad(unit(leaf), leaf, 3 * plain)
    assert relative_error(triton.finish(sums, x, norms, total, 3.0), expected) < 1e-5


SHAPES = {
    "plain": dict(queries=300, channels=64, hash_bits=8),
    "cross-odd": dict(queries=130, keys=513, channels=17, value_channels=40, hash_bits=8),
    "many-tokens": dict(queries=5000, keys=6000, channels=64, hash_bits=8),
    "two-digit-codes": dict(queries=5000, keys=3000, channels=64, hash_bits=12),
    "two-digit-codes-far": dict(heads=1, queries=20000, keys=9000, channels=16, hash_bits=12),
    "more-buckets-than-tokens": dict(queries=100, keys=70, channels=64, hash_bits=16),
    "heavy-buckets": dict(heads=1, queries=20000, channels=64, hash_bits=1),
    "wide": dict(queries=700, channels=128, value_channels=96, hash_bits=6),
    "widest": dict(queries=700, channels=256, hash_bits=6),
    "narrow": dict(queries=700, channels=16, hash_bits=4),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("dtype", list(verbs.TYPES), ids=lambda t: str(t).removeprefix("torch."))
def test_at_most_twice_as_wrong_as_the_reference(case, masked, dtype):
    """Against float64: the kernel, and the reference in the same dtype."""
    if case["channels"] > kernels.MAX_CHANNELS[dtype]:
        pytest.skip(f"{case['channels']} channels of {dtype} have no kernel, and longspan says so")
    case = {"batch": 2, "heads": 2, **case}
    options = dict(hash_bits=case.pop("hash_bits"), num_hashes=6, seed=5)
    q, k, v = qkv(**case, dtype=dtype, device="cuda")
    if masked:
        options["key_mask"] = torch.rand(2, k.shape[2], device="cuda") < 0.7
    g = torch.randn(*q.shape[:3], v.shape[3], device="cuda").to(dtype)
    results = []
    for impl, wide in (("fused", dtype), ("reference", dtype), ("reference", torch.float64)):
        leaves = [x.to(wide).detach().clone().requires_grad_() for x in (q, k, v)]
        y = longspan.yoso(*leaves, impl=impl, **options)
        results.append([y, *torch.autograd.grad(y, leaves, g.to(wide))])
    # A query that met one key alone has g·v = 0 but for the rounding of g, which the reference does
    # not do: what dq and dk would be without that, τ/2 as large as dv, sets their floor.
    floor = torch.finfo(dtype).eps * options["hash_bits"] / 2 * results[2][3].norm()
    for name, kernel, plain, exact in zip(("y", "dq", "dk", "dv"), *results, strict=True):
        error, usual = ((x.double() - exact).norm() for x in (kernel, plain))
        allowed = 2 * usual + (floor if name in ("dq", "dk") else 0)
        assert error <= allowed, (name, *(float(x / exact.norm()) for x in (error, usual)))


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
    wide = torch.randn(1, 1, 9, 160, device="cuda")
    with pytest.raises(NotImplementedError, match=r"for more than 128 channels of torch\.float32"):
        longspan.yoso(wide, wide, wide, impl="fused")
    with pytest.raises(NotImplementedError, match="yoso has no fused kernel for gradient='true'"):
        longspan.yoso(q.float(), k.float(), v.float(), impl="fused", gradient="true")
