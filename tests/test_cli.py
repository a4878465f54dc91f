import dataclasses
import re
import shutil
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import longspan
from longspan import advice, cli, doctor, records
from longspan.bench.suite import Limits


@pytest.fixture
def invoke(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(cli.app, list(arguments))


def test_methods_lists_every_method_with_its_options(invoke):
    result = invoke("methods")
    assert result.exit_code == 0
    for name, method in longspan.METHODS.items():
        assert re.search(rf"│ {name} +│", result.output)
        assert method.paper in result.output
    for option in ("num_hashes=32", "num_landmarks=64", "key_projection", "window=128"):
        assert option in result.output


def test_doctor_names_versions_devices_and_every_method(invoke):
    result = invoke("doctor")
    assert result.exit_code == 0
    stamp = records.environment()
    for text in (f"torch {stamp['torch']}", f"python {stamp['python']}", stamp["cpu"]):
        assert text in result.output
    for device in doctor.devices():
        assert f"Methods on {device}" in result.output
    for name in longspan.METHODS:
        assert re.search(rf"^  {name} ", result.output, flags=re.M)


def test_doctor_gives_the_reasons_why_no_kernel_runs(monkeypatch):
    reasons = ["the kernel is asleep", "it is Sunday"]
    for name, answer in (("yoso", reasons), ("nystrom", [])):
        method = dataclasses.replace(
            longspan.METHODS[name], why_not_fused=lambda device, answer=answer: answer
        )
        monkeypatch.setitem(longspan.METHODS, name, method)
    said = {line.split()[0]: line for line in doctor.examine()["Methods on cpu"]}
    assert said["yoso"].endswith("  reference: the kernel is asleep; it is Sunday")
    assert said["nystrom"].endswith("  fused")


def test_doctor_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setitem(doctor.EXTRAS, "report", ("jinja2", "surely-not-installed"))
    findings = doctor.examine()
    assert findings["C++ compiler"][0].startswith("none found")
    line = "report: surely-not-installed missing; pip install 'longspan[report]'"
    assert line in findings["Optional extras"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "nystorm"], "did you mean 'nystrom'?"),
        (["--device", "tpu"], "device must be one of cpu"),
    ],
    ids=["method", "device"],
)
def test_bad_input_gets_one_sentence_and_code_2(invoke, tmp_path, arguments, message):
    result = invoke("demo", "--quick", "--output", str(tmp_path / "new"), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_output_that_cannot_be_a_folder_is_refused(invoke, tmp_path):
    (tmp_path / "file").touch()
    result = invoke("demo", "--quick", "--output", str(tmp_path / "file"))
    assert result.exit_code == 2
    assert "file" in result.stderr
    assert "Traceback" not in result.stderr


def test_negative_seed_is_refused(invoke):
    assert invoke("demo", "--seed", "-1").exit_code == 2


def test_the_version_is_told(invoke):
    assert invoke("--version").output == f"{longspan.__version__}\n"


def test_no_command_shows_the_commands(invoke):
    result = invoke()
    for command in ("demo", "methods", "doctor"):
        assert command in result.output


def test_quick_demo_from_the_shell(tmp_path):
    """The whole way: `python -m longspan demo --quick` in a fresh process."""
    command = [sys.executable, "-W", "error", "-m", "longspan", "demo", "--quick"]
    done = subprocess.run(
        [*command, "--method", "nystrom", "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "index.html") in done.stdout
    assert (tmp_path / "index.html").stat().st_size > 100_000
    run = records.read(tmp_path / "rows.jsonl")[0]
    assert run["command"] == f"longspan demo --quick --method nystrom --output {tmp_path}"


def test_importing_longspan_brings_none_of_the_command_line():
    code = (
        "import sys, longspan;"
        "sys.exit(bool({'typer', 'rich', 'plotly', 'jinja2'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bench_then_report(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("bench", "linformer", "--quick", "--length", "32", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "2 rows to measure, in 1 groups" in result.output
    assert "longspan report longspan-bench/rows.jsonl" in result.output
    rows = records.read("longspan-bench/rows.jsonl")
    assert {row["name"] for row in rows} == {"softmax", "eager"}
    result = invoke("bench", "length", "--length", "32", "--only", "nystrom-64", "--device", "cpu")
    assert result.exit_code == 0, result.output
    with (tmp_path / "longspan-bench" / "rows.jsonl").open("a") as file:
        file.write('{"kind": "timing"}\n')
    result = invoke("report", "--no-pictures")
    assert result.exit_code == 0, result.output
    assert "Left out: rows.jsonl: 1 row left out: mode must be of type str" in result.output
    assert "At 32 tokens one forward pass" in result.output
    assert (tmp_path / "longspan-bench" / "index.html").stat().st_size > 1_000_000


def test_bench_refuses_what_it_does_not_know(invoke):
    for words, text in (
        (["bench", "lenght"], "did you mean 'length'?"),
        (["bench", "spectrum"], "model must be named"),
        (["bench", "length", "--length", "0"], "length must be"),
    ):
        result = invoke(*words)
        assert result.exit_code == 2
        assert text in result.stderr
        assert "Traceback" not in result.stderr


def test_report_without_rows_says_so(invoke, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("report")
    assert result.exit_code == 2
    assert "rows must hold something to draw" in result.stderr


def test_report_without_plotly_says_what_to_install(invoke, tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    row = {"kind": "timing", "mode": "forward", "method": "yoso", "length": 512, "seconds": 1.0}
    records.append(path, row)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    result = invoke("report", str(path))
    assert result.exit_code == 2
    assert "pip install 'longspan[report]'" in result.stderr


def test_advise_answers_in_a_sentence(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr(advice, "LIMITS", Limits(0.0, 60.0, 600.0))
    words = ["advise", "--length", "64", "--heads", "1", "--head-dim", "8", "--device", "cpu"]
    result = invoke(*words, "-o", str(tmp_path / "rows.jsonl"))
    assert result.exit_code == 0, result.output
    assert "At 64 tokens (inference, 1 head of 8, float32" in result.output
    assert "In code: longspan." in result.output
    again = invoke(*words, "--rows", str(tmp_path / "rows.jsonl"))
    assert "to measure" not in again.output
    assert "At 64 tokens" in again.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_advise_for_a_device_that_is_not_here(invoke):
    result = invoke("advise", "--length", "64", "--device", "cuda")
    assert result.exit_code == 0
    assert "There is no cuda here" in result.output
