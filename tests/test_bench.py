import time

import pytest
import torch

import longspan
from longspan import records
from longspan.bench import MODES, Case, Timing, cpu, gpu, measure, timing_row


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


def test_calls_are_interleaved_after_the_warm_up():
    order = []
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}
    timings = measure(calls, budget=0, warmup=1, min_repeats=3)
    assert "".join(order) == "ab" * 4
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


def test_row_is_flat():
    row = timing_row(Case("yoso", 512), MODES[0], Timing(0.5, 0.4, 0.6, 7))
    assert row["kind"] == "timing"
    assert (row["method"], row["length"], row["mode"]) == ("yoso", 512, "forward")
    assert (row["seconds"], row["repeats"], row["head_dim"]) == (0.5, 7, 64)


@pytest.mark.gpu
def test_gpu_time_is_that_of_the_kernels():
    call = Case("softmax", 8192, device="cuda").build("forward")
    short = Case("softmax", 512, device="cuda").build("forward")
    timings = measure({"long": call, "short": short}, budget=0.5, device="cuda")
    assert timings["long"].seconds > 3 * timings["short"].seconds


@pytest.mark.parametrize(("length", "heads"), [(512, 512), (4096, 64), (131072, 8)])
def test_gpu_rows_compare_equal_work_at_every_length(length, heads):
    cases = {name: case for name, case, _ in gpu.contenders(length)}
    assert list(cases) == ["softmax cuDNN", "softmax flash", "yoso-16 fused", "yoso-32 fused"]
    assert {(c.length, c.heads, c.dtype, c.device) for c in cases.values()} == {
        (length, heads, "bfloat16", "cuda")
    }


def test_cpu_rows_hold_every_method_and_its_ratio(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cpu, "BUDGET", 0)
    cpu.main(str(tmp_path / "rows.jsonl"), lengths=(32, 64))
    rows = records.read(tmp_path / "rows.jsonl")
    assert {row["method"] for row in rows} == set(longspan.METHODS)
    assert {(row["length"], row["mode"]) for row in rows} == {
        (n, m) for n in (32, 64) for m in MODES
    }
    exact = {(r["length"], r["mode"]): r["seconds"] for r in rows if r["name"] == "softmax"}
    for row in rows:
        assert row["ratio"] == exact[row["length"], row["mode"]] / row["seconds"]
    assert "yoso_expectation eager" in capsys.readouterr().out


def test_cpu_rows_of_some_names_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu, "BUDGET", 0)
    cpu.main(str(tmp_path / "rows.jsonl"), lengths=(32,), names=("nystrom", "linf"))
    rows = records.read(tmp_path / "rows.jsonl")
    assert {row["name"] for row in rows} == {"nystrom", "linformer", "linformer frozen"}
    assert {row["ratio"] for row in rows} == {None}


def test_the_eager_expectation_is_ours():
    inputs = cpu._inputs(Case("yoso_expectation", 40, heads=2, head_dim=8), MODES[1])
    g = torch.randn_like(inputs[0])
    results = []
    for attend in (cpu._Eager.attend, longspan.yoso_expectation):
        y = attend(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, g)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_what_would_take_too_long_is_left_out():
    before = {"softmax": 1e9, "yoso fused": 1.0, "strided": 1e9, "yoso_expectation eager": 0.1}
    left = [name for name in (*before, "dropped") if cpu._too_long(name, 8192, before, 2)]
    assert left == ["strided", "yoso_expectation eager", "dropped"]
    assert not cpu._too_long("strided", 8192, {}, 1)
    assert cpu._too_long("yoso fused", 8192, before, 8)
