"""The suites of `longspan bench`, at toy sizes: what rows hold, and that a run goes on."""

import subprocess
import sys

import pytest
import torch

from longspan import records
from longspan.bench import MODES, affordable, length, linformer, model, peak_bytes, predict, suite
from longspan.bench.__main__ import main
from longspan.bench.suite import Entry, Group, Limits, Setting
from longspan.bench.suites import SUITES, plan


def test_prediction_continues_power_laws():
    assert predict({512: 1.0, 1024: 2.0}, 2048) == pytest.approx(4.0)
    assert predict({512: 1.0, 1024: 4.0}, 4096) == pytest.approx(64.0)
    assert predict({512: 1.0}, 1024) == pytest.approx(4.0)


def test_prediction_does_not_follow_noise_beyond_square_and_line():
    assert predict({512: 1.0, 1024: 9.0}, 2048) == pytest.approx(36.0)
    assert predict({512: 1.0, 1024: 0.5}, 2048) == pytest.approx(1.0)


def test_slow_calls_are_left_out():
    predicted = {"quadratic": 16.0, "linear": 4.0}
    assert affordable(predicted, patience=5, left=1000, calls=4) == {"linear": 4.0}
    assert affordable(predicted, patience=50, left=1000, calls=4) == predicted


def test_when_time_runs_out_the_slowest_goes_first_and_what_is_kept_last():
    predicted = {"slow": 4.0, "quick": 0.4}
    assert affordable(predicted, patience=50, left=17.7, calls=4) == predicted
    assert affordable(predicted, patience=50, left=17.5, calls=4) == {"quick": 0.4}
    assert affordable(predicted, patience=50, left=17.5, calls=4, keep="slow") == {"slow": 4.0}
    assert affordable(predicted, patience=50, left=0, calls=4, keep="slow") == {}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_of_a_call_on_a_cpu():
    """64 MiB that are written to and let go. Linux counts pages in batches, the interpreter adds."""
    peak = peak_bytes(lambda: torch.ones(1 << 24).sum(), "cpu")
    assert 62 << 20 <= peak < 68 << 20
    assert peak_bytes(lambda: None, "cpu") < 2 << 20


def run_suites(names, path, setting, **more):
    return suite.run(plan(names, setting), path, setting, **more)


@pytest.fixture
def fast(monkeypatch):
    """No time for repeats."""
    monkeypatch.setattr(Limits, "of", lambda setting: Limits(0.0, 60.0, 600.0))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.jsonl"


def test_length_rows_hold_time_memory_and_how_they_were_made(fast, path):
    run_suites(["length"], path, Setting(lengths=(64, 128)), command="longspan bench length")
    rows = records.read(path)
    assert {row["name"] for row in rows} == set(length.NAMES)
    assert {(row["length"], row["mode"]) for row in rows} == {
        (n, m) for n in (64, 128) for m in MODES
    }
    assert len({row["key"] for row in rows}) == len(rows) == 4 * len(length.NAMES)
    for row in rows:
        assert row["kind"] == "timing"
        assert row["suite"] == "length"
        assert row["seconds"] > 0
        assert row["peak_bytes"] >= 0
        assert row["command"] == "longspan bench length"
        assert row["seed"] == 0
        assert row["environment"]["torch"] == str(torch.__version__)
    options = {row["name"]: row["options"] for row in rows}
    assert options["nystrom-32"] == {"num_landmarks": 32}
    assert options["window-257"] == {"window": 128}


def test_the_paper_s_contenders_and_lengths_are_there():
    assert length.lengths(Setting()) == (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
    assert length.lengths(Setting(device="cuda"))[-1] == 131072
    group = length.group(512, "forward", Setting(device="cuda"))
    assert group.batch == 64  # 2^18 token-heads
    assert group.entries[0].about["dtype"] == "bfloat16"


def test_a_run_goes_on_where_it_stopped(fast, path):
    said = []
    setting = Setting(lengths=(32,))
    names = list(length.NAMES)
    group = length.group(32, "forward", setting)
    part = Group(group.title, group.entries[:2], group.series, group.length, group.batch)
    assert suite.run([("length", part)], path, setting, say=said.append) == 2
    assert suite.run([("length", group)], path, setting, say=said.append) == len(names) - 2
    assert [row["name"] for row in records.read(path)] == names
    assert suite.run([("length", group)], path, setting, say=said.append) == 0
    assert said[-1].startswith("0 rows to measure")
    assert suite.run([("length", part)], path, setting, fresh=True, say=said.append) == 2
    other = Setting(lengths=(32,), seed=1)
    assert suite.run([("length", part)], path, other, say=said.append) == 2


def test_some_names_alone_and_exact_attention(fast, path):
    run_suites(["length"], path, Setting(lengths=(32,)), only=["nystrom", "linf"], say=str)
    names = {row["name"] for row in records.read(path)}
    assert names == {"softmax", "nystrom-64", "nystrom-32", "linformer-256"}


def test_rows_of_another_machine_do_not_count(fast, path, monkeypatch):
    setting = Setting(lengths=(32,))
    run_suites(["linformer"], path, setting, say=str)
    stamp = records.environment()
    monkeypatch.setattr(records, "environment", lambda: {**stamp, "cpu": "another"})
    assert run_suites(["linformer"], path, setting, say=str) == 2


def timed(name, **more):
    return Entry(name, {"method": name}, lambda: lambda: None, **more)


def test_what_would_take_too_long_is_stopped_with_a_reason_and_stays_so(path, monkeypatch):
    monkeypatch.setattr(Limits, "of", lambda setting: Limits(0.0, 1.0, 100.0))
    groups = [
        ("s", Group(f"{n}", [timed("softmax"), timed("other")], "series", n)) for n in (1, 2, 4)
    ]
    monkeypatch.setattr(
        suite, "predict", lambda seconds, n: {2: 9.0}.get(n, 0.1) if len(seconds) == 1 else 0.1
    )
    suite.run(groups, path, Setting(), say=str)
    rows = records.read(path)
    assert [row["kind"] for row in rows] == ["timing"] * 2 + ["stopped"] * 4
    assert rows[2]["reason"] == "would take about 9 s a call"
    assert rows[2]["predicted"] == 9.0
    assert rows[4]["reason"] == "stopped at a shorter length"


def test_out_of_memory_is_a_row_and_other_errors_are_errors(fast, path):
    def fail(error):
        def call():
            raise error

        return lambda: call

    entries = [
        Entry("full", {}, fail(torch.OutOfMemoryError("CUDA out of memory"))),
        Entry("malloc", {}, fail(RuntimeError("DefaultCPUAllocator: can't allocate memory"))),
        timed("huge", needs=1 << 60),
        timed("fine", extra=lambda row: {"half": row["seconds"] / 2}),
        Entry("computed", {"kind": "spectrum"}, extra=lambda row: {"value": 3}),
    ]
    suite.run([("s", Group("g", entries))], path, Setting(), say=str)
    rows = {row["name"]: row for row in records.read(path)}
    assert rows["full"]["reason"] == rows["malloc"]["reason"] == "out of memory"
    assert "GB of memory" in rows["huge"]["reason"]
    assert rows["fine"]["half"] == rows["fine"]["seconds"] / 2
    assert (rows["computed"]["kind"], rows["computed"]["value"]) == ("spectrum", 3)
    with pytest.raises(RuntimeError, match="shapes"):
        suite.run(
            [("s", Group("h", [Entry("bad", {}, fail(RuntimeError("shapes")))]))],
            path,
            Setting(),
            say=str,
        )


def test_time_left_is_told(fast, path):
    said = []
    run_suites(["linformer"], path, Setting(lengths=(32, 64)), say=said.append)
    assert said[0].startswith("4 rows to measure, in 2 groups")
    assert any(line.startswith("[2/2] linformer: 64 tokens") and "s left" in line for line in said)


def test_linformer_grid_is_the_paper_s():
    groups = {group.length: group for group in linformer.groups(Setting())}
    assert list(groups) == [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
    assert [e.name for e in groups[1024].entries] == [
        "softmax", "eager", "linformer-128", "linformer-256", "linformer-512",
    ]  # fmt: skip
    assert groups[65536].entries[-1].name == "linformer-2048"


def test_model_rows_are_of_whole_encoders(fast, path, monkeypatch):
    monkeypatch.setattr(model, "SIZES", {32: (2, 2, 64)})
    run_suites(["model"], path, Setting(lengths=(300,)), say=str)
    rows = records.read(path)
    assert {row["name"] for row in rows} == set(model.CHOSEN)
    assert {(row["mode"], row["layers"], row["width"], row["head_dim"]) for row in rows} == {
        (m, 2, 32, 16) for m in MODES
    }
    trained = next(row for row in rows if row["mode"] == MODES[1])
    assert trained["largest_batch"] > 10
    assert trained["weights_bytes"] > 4 * (2 * 4 * 32 * 32 + 2 * 2 * 32 * 64)


def test_a_training_step_changes_the_weights(monkeypatch):
    about = {"width": 256, "method": "nystrom", "options": {}, "length": 16, "batch": 1}
    network = model.encoder(about, 0, "cpu")
    monkeypatch.setattr(model, "encoder", lambda *arguments: network)
    step = model._step({**about, "mode": MODES[1]}, Setting())
    before = network.layers[0].up.weight.detach().clone()
    step()
    assert not torch.equal(before, network.layers[0].up.weight)


def test_every_suite_has_groups_and_a_summary():
    for name, row in SUITES.items():
        assert row.summary
        if name not in ("spectrum",):
            assert next(iter(row.groups(Setting(quick=True)))).entries


def test_unknown_suite_and_missing_gpu_are_refused(path):
    with pytest.raises(ValueError, match="did you mean 'length'"):
        run_suites(["lenght"], path, Setting())
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device must be one that torch sees"):
            run_suites(["length"], path, Setting(device="cuda"))


def test_without_typer_and_plotly(path):
    """What a GPU machine with its own Python may lack."""
    code = (
        "import sys; sys.modules.update(typer=None, rich=None, plotly=None, jinja2=None);"
        "from longspan.bench.__main__ import main; main(sys.argv[1:])"
    )
    words = ["linformer", "--length", "32", "--device", "cpu", "-o", str(path)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "softmax" in done.stdout
    row = records.read(path)[0]
    assert row["command"] == f"python -m longspan.bench {' '.join(words)}"


def test_main_takes_the_options(path, fast, capsys):
    main(
        [
            "linformer",
            "--length",
            "32",
            "--quick",
            "--seed",
            "3",
            "--device",
            "cpu",
            "-o",
            str(path),
        ]
    )
    row = records.read(path)[0]
    assert (row["seed"], row["quick"]) == (3, True)
