"""The suites of `longspan bench`, at toy sizes: what rows hold, and that a run goes on."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from longspan import records
from longspan.bench import (
    MODES,
    affordable,
    error,
    length,
    linformer,
    model,
    peak_bytes,
    predict,
    real,
    spectrum,
    suite,
    suites,
)
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
    """64 MiB that are written to and let go. Linux counts pages in batches."""
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
    with pytest.raises(ValueError, match=r"only must begin one of .*softmax.*, got 'zzz'"):
        run_suites(["length"], path, Setting(lengths=(32,)), only=["zzz"], say=str)
    for device in ("tpu", "meta"):
        with pytest.raises(ValueError, match=f"device must be one of cpu, cuda, .*got '{device}'"):
            Setting(device)


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


def test_what_was_stopped_at_one_length_is_timed_at_shorter_ones(fast, path):
    """As exact attention is in a second suite of the same run."""
    huge = Group("4", [timed("other", needs=1 << 60)], "series", 4)
    small = Group("2", [timed("other")], "series", 2)
    suite.run([("first", huge), ("second", small)], path, Setting(), say=str)
    assert [row["kind"] for row in records.read(path)] == ["stopped", "timing"]


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


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A tiny BERT of 64 positions, and a text long enough for it to read."""
    transformers = pytest.importorskip("transformers", reason="needs longspan[huggingface]")
    import zoo

    folder = tmp_path_factory.mktemp("reader")
    config = transformers.BertConfig(**zoo.SMALL | {"max_position_embeddings": 64})
    zoo.checkpoint(folder, transformers.BertModel, config)
    generator = torch.Generator().manual_seed(0)
    words = ("paris", "france", "is", "the", "of", "a")
    drawn = torch.randint(len(words), (64 * 40,), generator=generator).tolist()
    (folder / "text.txt").write_text(" ".join(words[i] for i in drawn))
    return Setting(model=str(folder), text=str(folder / "text.txt"), quick=True)


def test_real_inputs_are_what_the_layers_get(reader):
    """Attention of what was recorded, layer by layer, is what the model computes."""
    found = real.layers(reader)
    assert len(found) == 2
    q, k, v = found[0]
    assert q.shape == k.shape == v.shape == (real.WINDOWS, 4, 64, q.shape[-1])
    assert real.layers(reader)[0][0] is q  # read once
    control = real.layers(reader, "random")
    assert control[0][0].shape == q.shape
    assert not torch.equal(control[0][0], q)


def test_a_text_that_is_too_short_says_so(reader, tmp_path):
    (tmp_path / "short.txt").write_text("paris is the")
    with pytest.raises(ValueError, match="text must have at least 64 tokens, got 3"):
        real.layers(replace(reader, text=str(tmp_path / "short.txt")))


def test_rows_name_model_and_text_without_folders(reader):
    names = real.names(reader.model, reader.text)
    assert names["text"] == "text.txt"
    assert names["model"].count("/") == 1
    assert real.names("owner/name", None) == {"model": "owner/name", "text": "longspan's source"}


def test_error_rows_follow_theory(fast, path, reader):
    """More hashes and more landmarks come nearer; yoso's error falls as 1/√num_hashes."""
    run_suites(["error"], path, replace(reader, lengths=(128,)), say=str)
    rows = records.read(path)
    assert {row["inputs"] for row in rows} == {"spread", "clustered", "real"}
    found = {(row["inputs"], row["name"]): row for row in rows}
    for inputs in ("clustered", "real"):
        exact = found[inputs, "softmax"]
        assert exact["error_limit"] < 1e-5
        few = found[inputs, "yoso num_hashes=8 hash_bits=8"]["error_limit"]
        many = found[inputs, "yoso num_hashes=128 hash_bits=8"]["error_limit"]
        # A quarter, in the limit: while errors are large, the norm of the output bends the law.
        assert many < 0.5 * few
        expectation = found[inputs, "yoso_expectation hash_bits=8"]
        assert expectation["error_limit"] < 1e-5
        assert expectation["error_softmax"] > 0.01
    real_row = found["real", "softmax"]
    assert real_row["batch"] == 2  # a stretch in each of two layers
    assert real_row["text"] == "text.txt"
    assert all(row["seconds"] > 0 for row in rows)


def test_without_a_model_there_are_no_real_rows():
    titles = [group.title for group in error.groups(Setting(quick=True))]
    assert [title.split()[0] for title in titles] == ["spread", "clustered"]


def test_spectrum_rows_hold_curves_a_control_and_what_e_learned(fast, path, reader):
    run_suites(["spectrum"], path, reader, say=str)
    rows = records.read(path)
    spectra = [row for row in rows if row["kind"] == "spectrum"]
    assert {(row["weights"], row["layer"]) for row in spectra} == {
        (w, n) for w in ("trained", "random") for n in (0, 1)
    }
    for row in spectra:
        assert len(row["cumulative"]) == len(row["at_quarter"]) == row["heads"] == 4
        assert row["places"][0] == 1
        assert row["places"][-1] == row["length"] == 64
        for curve in row["cumulative"]:
            assert curve == sorted(curve)
            assert curve[-1] == pytest.approx(1, abs=1e-3)
    learned = [row for row in rows if row["kind"] == "projection"]
    assert [row["layer"] for row in learned] == [0, 1]
    for row in learned:
        assert row["error_after"] < row["error_before"]
        assert row["options"] == {"projected_length": 16}


def test_spectrum_needs_a_model(path):
    with pytest.raises(ValueError, match="model must be named for the suite spectrum"):
        run_suites(["spectrum"], path, Setting())


def test_singular_values_of_known_matrices():
    """Equal keys give a matrix of rank one; far-apart ones the identity, all values equal."""
    q = torch.randn(1, 1, 32, 64)
    assert spectrum.cumulative(q, q[:, :, :1].expand_as(q))[0, 0] == pytest.approx(1, abs=1e-4)
    eye = 100 * torch.eye(32, 64)[None, None]
    shares = spectrum.cumulative(eye, eye)[0]
    torch.testing.assert_close(shares, torch.arange(1, 33) / 32.0)


def test_a_mean_of_neighbours_is_recognised():
    means = torch.block_diag(*(torch.ones(1, 8) for _ in range(4)))
    look = spectrum.describe(means)
    assert look["likeness"] == pytest.approx(1)
    assert look["support"] == pytest.approx(8)
    assert look["entropy"] == pytest.approx(3 / 5)  # log 8 / log 32
    noise = spectrum.describe(torch.randn(64, 512))
    assert noise["likeness"] < 0.5
    assert noise["support"] > 300


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


def test_without_transformers_two_suites_say_so(monkeypatch):
    monkeypatch.setattr(suites, "find_spec", lambda name: None)
    assert plan(["length"], Setting(quick=True))
    for name, setting in (("model", Setting()), ("error", Setting(model="a"))):
        with pytest.raises(ValueError, match=r"pip install 'longspan\[huggingface\]'"):
            plan([name], setting)


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
