"""The CPU kernels of YOSO: held to the reference, verb by verb and as a whole."""

import math
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from attention.test_yoso_hashing import pairs, sparse_pairs
from cases import qkv, relative_error

import longspan
from longspan import doctor
from longspan.attention.base import unit
from longspan.attention.yoso import cpu, hashing, library

CPU = torch.device("cpu")
missing = cpu.why_not(CPU)
needs_library = pytest.mark.skipif(bool(missing), reason="; ".join(missing))
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(params=["plain", "avx2", "avx512"])
def instructions(request):
    """Each instruction set in turn, then the best again."""
    best, choose = library.instructions(), library.handle.longspan_choose
    if not choose(request.param.encode()):
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    assert choose(best.encode())


@pytest.fixture
def threads():
    """A way to set the number of threads, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def both_passes(q, k, v, g, dtype=None, **options):
    leaves = [x.to(dtype or x.dtype).detach().requires_grad_() for x in (q, k, v)]
    y = longspan.yoso(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, g.to(y.dtype))]


SHAPES = {
    "plain": dict(queries=300, channels=64, hash_bits=8),
    "one-token": dict(queries=1, channels=64, hash_bits=2),
    "cross-odd": dict(queries=130, keys=513, channels=17, value_channels=40, hash_bits=8),
    "many-tokens": dict(heads=1, queries=2600, keys=2100, channels=64, hash_bits=8),
    "two-byte-codes": dict(heads=1, queries=2600, keys=1700, channels=64, hash_bits=10),
    "more-buckets-than-tokens": dict(queries=100, keys=70, channels=64, hash_bits=16),
    "heavy-buckets": dict(heads=1, queries=700, keys=200, channels=48, hash_bits=1),
    "wide": dict(queries=200, channels=128, value_channels=96, hash_bits=6),
    "widest": dict(batch=1, queries=100, channels=300, value_channels=272, hash_bits=4),
    "narrow": dict(queries=300, channels=3, value_channels=5, hash_bits=4),
    "many-heads": dict(batch=3, heads=5, queries=40, channels=32, hash_bits=5),
}


@needs_library
@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("gradient", ["surrogate", "true"])
@pytest.mark.parametrize("normalize", [True, False], ids=["unit", "raw"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, *HALF], ids=lambda t: str(t).removeprefix("torch.")
)
def test_at_most_twice_as_wrong_as_the_reference(case, gradient, normalize, dtype):
    """Against float64: the kernel, and the reference in the same dtype, with a mask."""
    case = {"batch": 2, "heads": 2, **case}
    options = dict(hash_bits=case.pop("hash_bits"), num_hashes=6, backward_hashes=4, seed=5)
    options |= dict(gradient=gradient, normalize=normalize)
    q, k, v = qkv(**case, dtype=dtype)
    if k.shape[2] > 1:
        options["key_mask"] = torch.arange(k.shape[2]).expand(len(k), -1) % 7 != 3
    g = torch.randn(*q.shape[:3], v.shape[3], dtype=dtype)
    kernel = both_passes(q, k, v, g, impl="fused", **options)
    plain = both_passes(q, k, v, g, impl="reference", **options)
    exact = both_passes(q, k, v, g, torch.float64, **options)
    for name, a, b, c in zip(("y", "dq", "dk", "dv"), kernel, plain, exact, strict=True):
        assert a.dtype == dtype
        error, usual = ((x.double() - c).norm() for x in (a, b))
        # Where nothing is left but rounding, a handful of units in the last place of the terms.
        floor = torch.finfo(torch.float32).eps * v.double().norm() * options["hash_bits"]
        assert error <= 2 * usual + floor, (name, float(error / c.norm()), float(usual / c.norm()))


@needs_library
@pytest.mark.parametrize("hash_bits", [1, 8, 11])
@pytest.mark.parametrize("gradient", ["surrogate", "true"])
@pytest.mark.parametrize("hashing", ["gaussian", "hadamard"])
def test_every_instruction_set_is_right(instructions, hash_bits, gradient, hashing):
    q, k, v = qkv(batch=1, heads=2, queries=211, keys=173, channels=40, value_channels=72)
    g = torch.randn(1, 2, 211, 72)
    mask = torch.rand(1, 173) < 0.8
    options = dict(hash_bits=hash_bits, num_hashes=9, gradient=gradient, seed=5, key_mask=mask)
    # In float32 the reference's Hadamard codes differ in some bits: compare sums for given codes.
    if hashing == "hadamard":
        agree = bits_that_differ(q, "hadamard", 9, hash_bits)
        assert agree < 1e-3
        return
    kernel = both_passes(q, k, v, g, impl="fused", **options)
    exact = both_passes(q, k, v, g, torch.float64, **options)
    for name, a, b in zip(("y", "dq", "dk", "dv"), kernel, exact, strict=True):
        # float32 sums of at most some hundred terms, and for dq and dk of their differences.
        assert relative_error(a, b) < 5e-6, name


def bits_that_differ(x, hashing_name, num_hashes, hash_bits):
    """The share of bits in which the kernel's codes are not the reference's."""
    sizes = 7, x.shape[1], x.shape[3], num_hashes, hash_bits
    expected = hashing.hash_codes(unit(x.float()), hashing.projections(hashing_name, *sizes, CPU))
    actual, again = cpu.hash_codes(x, x.flip(2), hashing_name, 7, num_hashes, hash_bits)
    assert torch.equal(actual.int(), again.int().flip(3))  # wherever in a block a token stands
    different = expected ^ actual.int()
    return sum(((different >> t) & 1).double().mean().item() for t in range(hash_bits)) / hash_bits


@needs_library
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, 2**62 - 1])
def test_the_library_draws_the_planes_of_the_reference(instructions, seed):
    for sizes in ((1, 1, 1, 1), (3, 5, 7, 24), (8, 32, 8, 64)):
        heads, num_hashes, hash_bits, channels = sizes
        expected = hashing.projections(
            "gaussian", seed, heads, channels, num_hashes, hash_bits, CPU
        )
        assert torch.equal(cpu.gaussian_planes(seed, *sizes), expected)


@needs_library
@pytest.mark.parametrize("hash_bits", [*range(1, 10), 12, 16])
def test_gaussian_codes_are_those_of_the_reference(instructions, hash_bits):
    for channels, dtype in ((24, torch.float32), (64, torch.bfloat16), (3, torch.float16)):
        x, _, _ = qkv(queries=101, channels=channels, dtype=dtype)
        # Bits may differ where a projection is within rounding of zero: here, nowhere.
        assert bits_that_differ(x, "gaussian", 11, hash_bits) == 0


@needs_library
@pytest.mark.parametrize("channels", [1, 5, 8, 16, 24, 64, 100, 256, 300])
def test_hadamard_codes_are_nearly_those_of_the_reference(instructions, channels):
    """16-bit integers: a projection near zero may round to the other side of it."""
    for num_hashes, hash_bits in ((3, 8), (70, 5), (9, 16)):
        x, _, _ = qkv(queries=70, channels=channels)
        # A rounding is half a unit of 32767 / width; three of them move one sign in a thousand.
        assert bits_that_differ(x, "hadamard", num_hashes, hash_bits) < 4e-3


@needs_library
@pytest.mark.parametrize(
    ("draw", "cosine", "tolerance"),
    [
        *((pairs, 0.0, 0.03), (pairs, 0.5, 0.02), (pairs, 0.8, 0.02), (pairs, 0.95, 0.02)),
        *((sparse_pairs, 0.5, 0.05), (sparse_pairs, 0.8, 0.05)),
    ],
    ids=["dense-0", "dense-0.5", "dense-0.8", "dense-0.95", "sparse-0.5", "sparse-0.8"],
)
def test_hadamard_vectors_collide_as_often_as_their_angle_says(draw, cosine, tolerance):
    """2 % is the promise; one standard error of the test is 1 % at cosine 0, 0.6 % elsewhere."""
    generator = torch.Generator().manual_seed(1)
    rounds = 14 if cosine < 0.3 else 5
    agree = 0.0
    for seed in range(rounds):
        x, y = draw(20_000, 64, cosine, generator)
        a, b = cpu.hash_codes(x, y, "hadamard", seed, 32, 8)
        agree += (a == b).double().mean().item() / rounds
    assert agree == pytest.approx((1 - math.acos(cosine) / math.pi) ** 8, rel=tolerance)


@needs_library
def test_vectors_without_a_direction_have_codes():
    """Zeros, infinities, NaN, and vectors at either end of float32's range."""
    x = torch.randn(1, 1, 40, 64)
    x[0, 0, :4] = torch.tensor([0, torch.nan, torch.inf, -torch.inf])[:, None]
    x[0, 0, 4:8] *= 1e30
    x[0, 0, 8:12] *= 1e-30
    for name in ("gaussian", "hadamard"):
        codes, _ = cpu.hash_codes(x, x, name, 3, 5, 6)
        assert codes.max() < 2**6


@needs_library
@pytest.mark.parametrize("heads", [1, 3, 8])
@pytest.mark.parametrize("gradient", ["surrogate", "true"])
@pytest.mark.parametrize("hashing", ["gaussian", "hadamard"])
def test_every_number_of_threads_gives_the_same_bits(threads, heads, gradient, hashing):
    q, k, v = qkv(batch=1, heads=heads, queries=701, keys=333, channels=48)
    g = torch.randn_like(q)
    options = dict(hash_bits=4, num_hashes=10, gradient=gradient, hashing=hashing, impl="fused")
    results = []
    for count in (1, 2, 3, 8):
        threads(count)
        results.append(both_passes(q, k, v, g, seed=1, **options))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_library
def test_python_threads_and_the_gil():
    """Calls from several Python threads give the same bits, and others run meanwhile."""
    q, k, v = qkv(batch=1, heads=2, queries=3000, channels=64)
    g = torch.randn_like(q)
    options = dict(seed=1, impl="fused")
    expected = both_passes(q, k, v, g, **options)
    results, ticks, done = [], [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    clock = threading.Thread(target=tick)
    clock.start()
    codes = cpu.hash_codes(q, k, "gaussian", 1, 32, 8)
    start = time.perf_counter()
    cpu.pair_gradients(q, k, v, g, None, *codes, 256, 8, 32, "true", 1)
    end = time.perf_counter()
    # One call into the library takes some 100 ms: were the GIL held, the clock would stand still.
    assert sum(start < t < end for t in ticks) > 5
    workers = [
        threading.Thread(target=lambda: results.append(both_passes(q, k, v, g, **options)))
        for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done.set()
    clock.join()
    assert len(results) == 4
    for other in results:
        assert all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))


@needs_library
def test_forked_data_loader_workers():
    """Workers forked after the parent used its threads: same bits, no hang, one thread each."""
    program = """
        import torch
        import longspan

        def attend(seed):
            x = torch.randn(1, 4, 500, 32, generator=torch.Generator().manual_seed(seed))
            leaf = x.requires_grad_()
            y = longspan.yoso(leaf, leaf, leaf, seed=seed, impl="fused")
            return torch.stack([y.detach(), torch.autograd.grad(y.sum(), leaf)[0]])

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 6
            def __getitem__(self, i):
                return attend(i)

        torch.set_num_threads(2)
        expected = [attend(i) for i in range(6)]
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        print(all(torch.equal(a, b) for a, b in zip(loader, expected, strict=True)))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "True", done.stderr


@needs_library
def test_ops_are_registered_as_torch_asks():
    q, k, v = qkv(batch=1, heads=2, queries=20, keys=30, channels=16)
    mask = torch.arange(30)[None] < 25
    for dtype, normalize, bits in ((torch.float32, True, 4), (torch.bfloat16, True, 12)):
        inputs = [x.to(dtype) for x in (q, k, v)]
        forward = (*inputs, mask, torch.tensor(3), 5, bits, "gaussian", normalize)
        torch.library.opcheck(torch.ops.longspan.yoso_forward_cpu.default, forward)
        y, total, *saved = torch.ops.longspan.yoso_forward_cpu(*forward)
        rows = y if dtype == torch.float32 else total
        backward = (
            y,
            *inputs,
            mask,
            rows,
            *saved,
            torch.tensor(3),
            bits,
            3,
            "surrogate",
            normalize,
        )
        torch.library.opcheck(torch.ops.longspan.yoso_backward_cpu.default, backward)


@needs_library
@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_codes_that_no_bucket_has_are_refused(instructions, dtype):
    """The library checks what it would write by; everything up to the last bucket is fine."""
    q, k, v = qkv(batch=1, heads=2, queries=20, keys=31, channels=16)
    cq, ck = (torch.full((1, 2, 3, n), 9, dtype=dtype) for n in (20, 31))
    g = cpu.through_unit(q, q, None, 1.0)
    for codes in ((cq, ck), (ck[..., :20], ck)):
        cpu.collide(codes[1], None, v, codes[0], None, 10, v.dtype, 1.0, False)
        cpu.pair_gradients(q, k, v, g, None, *codes, 10, 4, 3, "surrogate", 0)
    for bad in ("q", "k"):
        codes = cq.clone(), ck.clone()
        codes[bad == "k"][0, 1, 2, -1] = 10
        with pytest.raises(ValueError, match="codes must be below the number of buckets"):
            cpu.collide(codes[1], None, v, codes[0], None, 10, v.dtype, 1.0, False)
        with pytest.raises(ValueError, match="codes must be below the number of buckets"):
            cpu.pair_gradients(q, k, v, g, None, *codes, 10, 4, 3, "surrogate", 0)
    with pytest.raises(ValueError, match="codes must be below the number of buckets"):
        cpu.compact_codes(cq.repeat(1, 1, 1, 2), (ck.int() * 25).to(dtype)[..., :3], 3)


@needs_library
@pytest.mark.parametrize("spread", ["one-bucket", "one-each", "random"])
def test_verbs_with_any_spread_of_codes(instructions, spread):
    """collide and pair_gradients against sums over pairs by brute force."""
    draw = {
        "one-bucket": lambda n: torch.full((2, 2, 3, n), 299),
        "one-each": lambda n: torch.arange(n).expand(2, 2, 3, -1) % 300,
        "random": lambda n: torch.randint(300, (2, 2, 3, n)),
    }[spread]
    q, k, v = qkv(heads=2, queries=333, keys=290, channels=24, value_channels=72)
    g = torch.randn(2, 2, 333, 72)
    mask = torch.rand(2, 290) < 0.7
    cq, ck = draw(333), draw(290)
    share = (cq[..., :, None] == ck[..., None, :]).double().sum(2) * mask[:, None, None, :]
    codes = cq.to(torch.uint16), ck.to(torch.uint16)
    y, _, _ = cpu.collide(codes[1], mask, v, codes[0], None, 300, torch.float32, 0.5, False)
    assert relative_error(y, 0.5 * share @ v.double()) < 1e-6
    wide = cpu.through_unit(g, g, None, 1 / 3)
    assert torch.equal(wide[..., :72], g * torch.tensor(1 / 3))
    assert (wide[..., 72:] == 0).all()
    dq, dk = cpu.pair_gradients(q, k, v, wide, mask, *codes, 300, 6, 3, "surrogate", 0)
    leaves = [q.double().requires_grad_(), k.double().requires_grad_()]
    units = [unit(x) for x in leaves]
    w = share * (g.double() @ v.double().mT) * (6 / 2 / 3)
    sums = w @ units[1].detach(), w.mT @ units[0].detach()
    expected = torch.autograd.grad(units, leaves, sums)
    assert relative_error(dq, expected[0]) < 3e-6
    assert relative_error(dk, expected[1]) < 3e-6


@needs_library
def test_a_bucket_with_all_keys_stays_linear():
    """One bucket of 16,384 tokens has 256 times the pairs of 256 buckets of 64.

    Both inputs take the same memory, and turns, so that neither caches nor other work on the
    machine tell them apart.
    """
    v, g = torch.randn(2, 1, 2, 16384, 64)
    one, many = torch.randn(64).expand_as(v).contiguous(), torch.randn_like(v)
    best = dict.fromkeys((one, many), math.inf)
    for _ in range(5):
        for x in best:
            start = time.perf_counter()
            both_passes(x, x, v, g, seed=1, num_hashes=4, impl="fused")
            best[x] = min(best[x], time.perf_counter() - start)
    assert best[one] < 4 * best[many]


@needs_library
def test_half_precision_is_read_by_the_kernels(monkeypatch):
    """No float32 copy of q, k or v is made around them."""
    seen = []
    real = library.call

    def watched(verb, **values):
        seen.extend(values[n] for n in ("x", "q", "k", "v") if n in values)
        real(verb, **values)

    monkeypatch.setattr(library, "call", watched)
    q, k, v = qkv(dtype=torch.bfloat16)
    both_passes(q, k, v, torch.randn_like(q), seed=1, impl="fused")
    # Hashed q and k, summed v; then the gradient, which is float32; then q, k and v again.
    wide = [x.dtype == torch.float32 for x in seen]
    assert wide == [False, False, False, True, False, False, False]


@needs_library
def test_doctor_names_the_instruction_set(instructions):
    assert doctor.examine()["CPU kernels"] == [f"built, on {instructions} instructions"]


@needs_library
def test_float64_has_the_reference_alone():
    q, k, v = qkv(dtype=torch.float64)
    with pytest.raises(NotImplementedError, match=r"no fused kernel for torch\.float64"):
        longspan.yoso(q, k, v, impl="fused")
    assert longspan.yoso(q, k, v, seed=1).dtype == torch.float64


def test_without_the_library_auto_takes_the_reference_and_fused_says_what_is_missing(
    monkeypatch, tmp_path
):
    for name in ("handle", "missing"):
        monkeypatch.setattr(library, name, getattr(library, name))  # put back afterwards
    library.use(tmp_path / "_cpu.so")
    q, k, v = qkv()
    expected = longspan.yoso(q, k, v, seed=1, impl="reference")
    assert torch.equal(longspan.yoso(q, k, v, seed=1), expected)
    with pytest.raises(NotImplementedError, match=r"installed without a C\+\+ compiler"):
        longspan.yoso(q, k, v, impl="fused")
    assert doctor.examine()["CPU kernels"][0].startswith("none: yoso's kernels for the CPU")
    said = {line.split()[0]: line for line in doctor.examine()["Methods on cpu"]}
    assert "reference: yoso's kernels for the CPU were not built" in said["yoso"]
    (tmp_path / "_cpu.so").write_bytes(b"not a library")
    library.use(tmp_path / "_cpu.so")
    with pytest.raises(NotImplementedError, match=r"cannot be loaded: .*_cpu\.so"):
        longspan.yoso(q, k, v, impl="fused")


@needs_library
def test_rows_that_no_cache_holds_take_narrow_slices():
    """More than 16 MB of rows a head: the tables' columns are split, the sums are the same."""
    q, k, v = qkv(batch=1, heads=1, queries=40_000, keys=30_000, channels=16, value_channels=64)
    codes = cpu.hash_codes(q, k, "gaussian", 1, 3, 4)
    y, _, _ = cpu.collide(codes[1], None, v, codes[0], None, 16, torch.float32, 1.0, False)
    expected = torch.zeros(40_000, 64, dtype=torch.float64)
    for h in range(3):
        table = torch.zeros(16, 64, dtype=torch.float64)
        table.index_add_(0, codes[1][0, 0, h].long(), v[0, 0].double())
        expected += table[codes[0][0, 0, h].long()]
    # Two thousand terms a bucket, one after the other in float32.
    assert relative_error(y[0, 0], expected) < 5e-6


@needs_library
def test_the_true_gradient_of_crowded_buckets_is_right_on_average():
    """Copies of one sequence in a batch share hashes, and draw from crowded buckets apart."""
    copies = 96
    q, k, v = (x.expand(copies, -1, -1, -1) for x in qkv(batch=1, heads=1, queries=500, keys=420))
    g = torch.randn(1, 1, 500, v.shape[3]).expand(copies, -1, -1, -1)
    options = dict(hash_bits=1, num_hashes=2, seed=5, gradient="true", normalize=False)
    results = []
    for impl, some in (("fused", slice(None)), ("reference", slice(1))):
        leaves = [x[some].contiguous().requires_grad_() for x in (q, k, v)]
        y = longspan.yoso(*leaves, impl=impl, **options)
        results.append(torch.autograd.grad(y, leaves, g[some]))
    for fused, plain, sampled in zip(*results, (True, True, False), strict=True):
        spread = relative_error(fused[:1], plain)
        assert sampled == (spread > 0.05)  # 250 tokens a side in a bucket: two of four blocks
        assert relative_error(fused.mean(0, keepdim=True), plain) < 1e-4 + 3 * spread / copies**0.5


@needs_library
@pytest.mark.slow
def test_the_true_gradient_of_one_bucket_is_linear():
    seconds = []
    for tokens in (2048, 32768):
        q, k, v = (x.requires_grad_() for x in qkv(batch=1, heads=1, queries=tokens, channels=16))
        options = dict(hash_bits=1, num_hashes=1, gradient="true")
        y = longspan.yoso(q[:, :, :1].expand_as(q), k, v, **options)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            torch.autograd.grad(y, (q, k, v), torch.ones_like(y), retain_graph=True)
            best = min(best, time.perf_counter() - start)
        seconds.append(best)
    # Sixteen times the tokens, which leave the caches; all pairs would take 256 times as long.
    assert seconds[1] < 64 * seconds[0]
