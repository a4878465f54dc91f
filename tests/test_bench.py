import time
from contextlib import nullcontext
from itertools import product

import pytest
import torch

import longspan
from longspan import records
from longspan.bench import (
    MODES,
    Case,
    Timing,
    baselines,
    cpu,
    gpu,
    gpu_fused,
    measure,
    timing_row,
)
from longspan.bench.cases import draw_inputs, fastest_exact, padding
from longspan.bench.measure import SETTLED_SECONDS
from longspan.bench.suite import Setting


@pytest.mark.parametrize("method", longspan.METHODS)
def test_every_method_builds_and_runs(method):
    case = Case(method, 40, heads=2, head_dim=8, batch=3, options=_small(method))
    assert case.build("forward")().shape == (3, 2, 40, 8)
    gradients = case.build("forward+backward")()
    assert [g.shape for g in gradients[:3]] == [(3, 2, 40, 8)] * 3
    assert all(g.isfinite().all() for g in gradients)


def _small(method):
    return {"projected_length": 16} if method == "linformer" else {}


def test_forward_keeps_no_graph_and_training_reaches_projections():
    case = Case("linformer", 40, heads=2, head_dim=8, options={"projected_length": 16})
    assert not case.build("forward")().requires_grad
    gradients = case.build("forward+backward")()
    assert [tuple(g.shape) for g in gradients[3:]] == [(16, 40)] * 2


def test_same_seed_same_inputs():
    case = Case("softmax", 16, heads=1, head_dim=4)
    assert torch.equal(case.build("forward")(), case.build("forward")())
    assert not torch.equal(case.build("forward")(), case.build("forward", seed=1)())


def test_dtype_is_that_of_the_case():
    assert Case("softmax", 16, dtype="bfloat16").build("forward")().dtype == torch.bfloat16


def test_unknown_mode_and_method_say_so():
    with pytest.raises(ValueError, match="mode must be one of forward, forward"):
        Case("softmax", 16).build("backward")
    with pytest.raises(ValueError, match="nystrom"):
        Case("nystorm", 16).build("forward")


def test_calls_are_interleaved_and_short_ones_follow_themselves():
    order = []

    def nap():
        order.append("b")
        time.sleep(1.1 * SETTLED_SECONDS)

    calls = {"a": lambda: order.append("a"), "b": nap}
    timings = measure(calls, budget=0, warmup=1, min_repeats=3)
    assert "".join(order) == "aab" * 4
    assert timings["a"].repeats == timings["b"].repeats == 3


def test_measured_seconds_are_those_of_the_call():
    timings = measure({"nap": lambda: time.sleep(0.02)}, budget=0, warmup=0, min_repeats=3)
    assert 0.02 <= timings["nap"].seconds < 0.2


def test_repeats_fill_the_budget_and_end_at_the_maximum():
    naps = {"nap": lambda: time.sleep(0.01)}
    assert measure(naps, budget=0.1, max_repeats=1000)["nap"].repeats <= 10
    assert measure(naps, budget=60, max_repeats=4)["nap"].repeats == 4


def test_a_call_beyond_patience_is_made_once():
    naps = {"long": lambda: time.sleep(0.02), "short": lambda: None}
    timings = measure(naps, budget=0, warmup=0, min_repeats=3, patience=0.01)
    assert (timings["long"].repeats, timings["short"].repeats) == (1, 3)


def test_on_round_sees_every_round():
    seen = []
    measure({"a": lambda: None}, budget=0, min_repeats=3, on_round=lambda t: seen.append(t["a"]))
    assert [timing.repeats for timing in seen] == [1, 2, 3]


def test_timing_is_median_and_quartiles():
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Timing(3.0, 2.0, 4.0, 5)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)
    assert Timing.of([2.0, 3.0], host=[0.5, 0.1, 0.4]).host_seconds == 0.4


def test_row_is_flat():
    row = timing_row(Case("yoso", 512), MODES[0], Timing(0.5, 0.4, 0.6, 7))
    assert row["kind"] == "timing"
    assert (row["method"], row["length"], row["mode"]) == ("yoso", 512, "forward")
    assert (row["seconds"], row["repeats"], row["head_dim"]) == (0.5, 7, 64)
    assert "host_seconds" not in row  # of a CPU, whose calls return when they are done
    row = timing_row(Case("yoso", 512), MODES[0], Timing(0.5, 0.4, 0.6, 7, 0.1))
    assert row["host_seconds"] == 0.1


def test_gpu_time_is_of_events_and_host_time_until_calls_returned(monkeypatch):
    """By events that say 40 ms for the calls between them, which return after 2 ms each."""
    waited = []

    class Event:
        def __init__(self, **_):
            pass

        record = synchronize = lambda self: waited.append(self)

        def elapsed_time(self, end):
            return 40.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    calls = {"nap": lambda: waited.append(time.sleep(0.002))}
    timing = measure(calls, budget=0, min_repeats=3, device="cuda")["nap"]
    # One call, for 40 ms are more than a sample may take; the one before it does not count.
    assert timing.seconds == timing.low == 0.04
    assert 0.002 <= timing.host_seconds < 0.02
    assert waited.count(None) == 2 * (1 + 3)


@pytest.mark.gpu
def test_gpu_time_is_that_of_the_kernels():
    call = Case("softmax", 8192, device="cuda").build("forward")
    short = Case("softmax", 512, device="cuda").build("forward")
    timings = measure({"long": call, "short": short}, budget=0.5, device="cuda")
    assert timings["long"].seconds > 3 * timings["short"].seconds
    assert timings["long"].host_seconds < timings["long"].seconds / 3


def test_inputs_are_what_they_say():
    def draw(inputs):
        q, k, _ = draw_inputs((3, 2, 64, 16), "float32", "cpu", False, 0, inputs=inputs)
        return q, k

    q, k = draw("clustered")
    distance = torch.cdist(q, k).flatten()
    near = distance < 0.5 * 32**0.5  # noise of 0.35 on both sides; centres are √(2 · 16) apart
    assert 0.01 < near.double().mean() < 0.1  # one in 32
    q, k = draw("one-key")
    assert (k == k[:, :1]).all()
    assert not torch.equal(q[:, 0], q[:, 1])
    assert not torch.equal(k[0], k[1])
    q, k = draw("one-vector")
    assert (k == k[:, :1]).all()
    assert torch.equal(q, k)


def test_exact_attention_is_the_same_by_any_kernel():
    """On a CPU the order names kernels that are not there; one that is gets the call."""
    call = Case("softmax", 40, heads=2, head_dim=8).build("forward")
    torch.testing.assert_close(fastest_exact(call)(), call())


@pytest.mark.gpu
def test_the_fastest_exact_kernel_is_no_slower_than_torch_s_choice():
    call = Case("softmax", 8192, dtype="bfloat16", device="cuda").build("forward")
    timings = measure({"own": call, "fast": fastest_exact(call)}, budget=0.5, device="cuda")
    assert timings["fast"].seconds < 1.1 * timings["own"].seconds


def test_unknown_inputs_say_so():
    with pytest.raises(ValueError, match="inputs must be one of 'spread', 'clustered'"):
        Case("softmax", 16, inputs="cluster").build("forward")


@pytest.mark.parametrize(("length", "heads"), [(512, 512), (4096, 64), (131072, 8)])
def test_gpu_rows_compare_equal_work_at_every_length(length, heads):
    found = list(gpu.contenders(64, length, "forward"))
    names = [contender.name for contender in found]
    assert names[:2] == ["softmax cuDNN", "softmax flash"]
    assert {f"yoso fused num_hashes={m} hash_bits=8" for m in (16, 32)} <= set(names)
    cases = [contender.case for contender in found]
    assert {(c.length, c.heads, c.dtype, c.device, c.head_dim) for c in cases} == {
        (length, heads, "bfloat16", "cuda", 64)
    }


def test_gpu_keys_differ():
    keys = [c.key(group[2]) for group in gpu.groups() for c in gpu.contenders(*group)]
    assert len(set(keys)) == len(keys)
    assert "yoso fused num_hashes=32 hash_bits=12, d=128, n=4096, spread, forward" in keys
    assert any("backward_hashes=8" in key for key in keys)
    assert {"clustered", "one-key", "one-vector"} <= {key.split(", ")[3] for key in keys}


def test_gpu_rows_are_a_whole_grid():
    found = {
        (*group, c.name, c.case.inputs) for group in gpu.groups() for c in gpu.contenders(*group)
    }
    for head_dim, exponent, mode in product((64, 128), range(9, 18), MODES):
        here = head_dim, 2**exponent, mode, "bfloat16"
        assert {(*here, f"softmax {name}", "spread") for name in ("cuDNN", "flash")} <= found
        for hashes, inputs in product((16, 32), ("spread", "clustered")):
            assert (*here, f"yoso fused num_hashes={hashes} hash_bits=8", inputs) in found
        for hashes in (16, 32):
            bits = min(exponent, 16)
            assert (*here, f"yoso fused num_hashes={hashes} hash_bits={bits}", "spread") in found
    for mode, length in product(MODES, (4096, 16384)):
        for dtype, exact in (("float16", "cuDNN"), ("float32", "efficient")):
            here = 64, length, mode, dtype
            assert (*here, f"softmax {exact}", "spread") in found
            assert (*here, "yoso fused num_hashes=32 hash_bits=8", "spread") in found


@pytest.fixture
def small_gpu(monkeypatch):
    """The benchmark at toy sizes on the CPU."""

    def contenders(head_dim, length, mode, dtype):
        shape = dict(length=length, heads=2, head_dim=8)
        yield gpu.Contender("softmax cuDNN", Case("softmax", **shape))
        for inputs in ("spread", "one-key"):
            options = dict(num_hashes=2, hash_bits=8, impl="reference")
            case = Case("yoso", options=options, inputs=inputs, **shape)
            yield gpu.Contender("yoso fused num_hashes=2", case)

    monkeypatch.setattr(gpu, "contenders", contenders)
    monkeypatch.setattr(gpu, "groups", lambda: list(product([8], (32, 64), MODES, ["float32"])))
    monkeypatch.setattr(gpu, "peak_bytes", lambda call: 5000)
    monkeypatch.setattr(gpu, "SECONDS", 0)


def test_gpu_rows_hold_what_ratios_and_memory_need(small_gpu, tmp_path):
    path = tmp_path / "rows.jsonl"
    gpu.run(path, lengths=(32, 64))
    rows = records.read(path)
    assert len({row["key"] for row in rows}) == len(rows) == 12
    for row in rows:
        assert row["v_bytes"] == 2 * row["length"] * 8 * 4
        assert row["outputs_bytes"] == row["v_bytes"] * (1 if row["mode"] == "forward" else 4)
        same = [r for r in rows if (r["length"], r["mode"]) == (row["length"], row["mode"])]
        assert row["exact_seconds"] == same[0]["seconds"]


def test_gpu_run_goes_on_where_it_stopped(small_gpu, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    gpu.run(path, lengths=(32,), only="ONE-KEY")
    assert [row["inputs"] for row in records.read(path)] == ["one-key"] * 2
    assert {row["length"] for row in records.read(path)} == {32}
    gpu.run(path, lengths=(32,))
    assert len(records.read(path)) == 6
    capsys.readouterr()
    gpu.run(path, lengths=(32,))
    assert "0 rows to measure" in capsys.readouterr().out
    gpu.run(path, lengths=(32,), only="one-key", fresh=True)
    assert [row["inputs"] for row in records.read(path)][6:] == ["one-key"] * 2


def test_gpu_rows_of_another_gpu_do_not_count(small_gpu, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    gpu.run(path, lengths=(32,))
    stamp = records.environment()
    monkeypatch.setattr(records, "environment", lambda: {**stamp, "gpu": "another"})
    gpu.run(path, lengths=(32,))
    assert len(records.read(path)) == 12


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_command_says_that_it_needs_one(capsys):
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        gpu.main(["--lengths", "512", "--only", "yoso"])
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        gpu_fused.main(["rows.jsonl", "nystrom"])
    with pytest.raises(SystemExit):
        gpu_fused.main(["rows.jsonl", "nystrm"])
    assert "got 'nystrm' (did you mean 'nystrom'?)" in capsys.readouterr().err


def test_fused_rows_go_on_where_they_stopped(tmp_path, monkeypatch):
    """Of a length that lacks a row all are measured again, for a ratio is of one run."""
    path = tmp_path / "rows.jsonl"
    methods = ["nystrom", "window"]
    every = [(mode, length) for mode in MODES for length in gpu_fused.LENGTHS]
    assert gpu_fused.left(str(path), methods) == every
    for name in gpu_fused.names(512, methods):
        row = dict(suite="fused-gpu", mode="forward", length=512, name=name)
        records.append(path, row)
    assert gpu_fused.left(str(path), methods) == every[1:]
    assert gpu_fused.left(str(path), list(gpu_fused.METHODS)) == every
    # On a GPU, one length of two is left; here exact attention and its measurements are stand-ins.
    case = Case("softmax", 512, heads=8)
    found = ["softmax cuDNN", "softmax flash", "softmax, padded", "nystrom fused"]
    monkeypatch.setattr(gpu_fused, "LENGTHS", (512, 1024))
    monkeypatch.setattr(gpu_fused, "MODES", ("forward",))
    monkeypatch.setattr(gpu_fused, "calls", lambda *_: dict.fromkeys(found, (case, list)))
    monkeypatch.setattr(gpu_fused, "peak_bytes", lambda call: 1)
    timing = Timing(1e-3, 1e-3, 1e-3, 1)
    monkeypatch.setattr(gpu_fused, "measure", lambda calls, **_: dict.fromkeys(calls, timing))
    before = len(records.read(path))
    gpu_fused.run(str(path), methods)
    assert len(records.read(path)) == before + len(found)
    gpu_fused.run(str(path), methods, fresh=True)
    assert len(records.read(path)) == before + 3 * len(found)


@pytest.mark.parametrize(("length", "heads"), [(512, 512), (4096, 64), (131072, 8)])
def test_fused_rows_compare_equal_work_at_every_length(length, heads):
    cases = {name: case for name, case, _ in gpu_fused.contenders(length, list(gpu_fused.METHODS))}
    assert list(cases)[:2] == ["softmax cuDNN", "softmax flash"]
    assert ("yoso_expectation fused" in cases) == (length <= 32768)
    assert ("yoso_expectation reference" in cases) == (length <= 4096)
    assert {(c.length, c.heads, c.dtype, c.device) for c in cases.values()} == {
        (length, heads, "bfloat16", "cuda")
    }


@pytest.mark.parametrize(("length", "batch"), [(512, 64), (4096, 8), (131072, 1)])
def test_padded_rows_compare_equal_work(length, batch):
    cases = dict(gpu_fused.padded(length, list(gpu_fused.METHODS)))
    assert list(cases)[:2] == ["softmax, padded", "yoso fused, padded"]
    assert ("yoso_expectation fused, padded" in cases) == (length <= 32768)
    assert {(c.length, c.heads, c.batch, c.inputs) for c in cases.values()} == {
        (length, 8, batch, "padded")
    }
    assert list(dict(gpu_fused.padded(length, ["nystrom"])))[2:] == ["nystrom fused, padded"]


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_quarter_of_a_padded_batch_is_masked(batch):
    mask = padding(batch, 400, "cpu")
    assert mask.shape == (batch, 400)
    assert mask.float().mean() == pytest.approx(0.75, abs=0.01)  # of whole tokens
    assert (mask.sum(1) >= 200).all()
    case = Case("softmax", 40, heads=2, head_dim=8, batch=batch, inputs="padded")
    q, k, v = draw_inputs((3, batch, 2, 40, 8), "float32", "cpu", False, 0, inputs="padded")
    expected = longspan.softmax(q, k, v, key_mask=padding(batch, 40, "cpu"))
    assert torch.equal(case.build("forward")(), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nystrom fused", "linformer fused", "window fused"])
def test_a_fused_call_can_be_timed_as_a_graph(name):
    method = name.split()[0]
    found = gpu_fused.calls(512, "forward+backward", [method])
    _, call = found[name + gpu_fused.GRAPH]
    call()  # captured
    call()
    torch.cuda.synchronize()
    assert "softmax cuDNN" + gpu_fused.GRAPH in found
    assert f"{method} reference" + gpu_fused.GRAPH not in found


def test_the_peer_computes_what_nystrom_does():
    """Its init is the original one."""
    pytest.importorskip("transformers", reason="needs transformers, from the extra [train]")
    q, k, v = (torch.randn(2, 256, 4 * 16) for _ in range(3))
    (actual,) = gpu_fused.hugging_face(q, k, v, heads=4)(q)
    q, k, v, actual = (x.unflatten(2, (4, 16)).transpose(1, 2) for x in (q, k, v, actual))
    expected = longspan.nystrom(q, k, v, num_landmarks=gpu_fused.LANDMARKS, init="original")
    # The same float32 products, in another order; the inverse amplifies their rounding.
    assert (actual - expected).norm() < 1e-3 * expected.norm()


def test_every_baseline_builds_and_runs():
    for name in baselines.BASELINES:
        options = {"projected_length": 16} if name.startswith("linformer") else {}
        case = Case(name, 40, heads=2, head_dim=8, options=options)
        assert case.build("forward")().shape == (1, 2, 40, 8)
        gradients = case.build("forward+backward")()
        assert all(g.isfinite().all() for g in gradients[:3])
        assert list(gradients[3:]) in ([], [None, None])  # frozen


def test_baselines_are_what_they_stand_for():
    """The same float32 sums in another order."""
    inputs = [torch.randn(2, 2, 40, 8, requires_grad=True) for _ in range(3)]
    g = torch.randn_like(inputs[0])
    for pair in (
        (baselines.expectation, longspan.yoso_expectation),
        (baselines.eager, longspan.softmax),
    ):
        results = []
        for attend in pair:
            y = attend(*inputs)
            results.append([y, *torch.autograd.grad(y, inputs, g)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_cpu_rows_hold_every_method_and_implementation():
    group = next(iter(cpu.groups(Setting(lengths=(32,)))))
    assert {entry.about["method"] for entry in group.entries} >= set(longspan.METHODS)
    names = [entry.name for entry in group.entries]
    assert names[0] == "softmax"
    assert {"linformer frozen", "yoso_expectation eager", "yoso reference"} <= set(names)
    assert len(set(names)) == len(names)
    for entry in group.entries:
        entry.build()()
    with pytest.raises(ValueError, match="device must be cpu"):
        next(cpu.groups(Setting(device="cuda")))
