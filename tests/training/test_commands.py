import json

import pytest
import texts
from typer.testing import CliRunner

from longspan import cli, records


@pytest.fixture
def invoke(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    return lambda *arguments: runner.invoke(cli.app, [str(a) for a in arguments])


def sets(**settings):
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def test_from_text_to_a_scored_model(invoke, tmp_path):
    raw = tmp_path / "raw"
    raw.mkdir()
    for number in range(20):
        (raw / f"{number:02}.txt").write_text(texts.document(number))
    tokens = tmp_path / "tokens"
    told = invoke("tokenize", raw, "--output", tokens, "--vocab-size", 100)
    assert told.exit_code == 0, told.output
    assert "validation: 1 documents" in told.output
    output = tmp_path / "out"
    train = ["train", "mlm", "--method", "nystrom", "--output", output]
    more = ["--size", "tiny", "--length", 32, "--data-dir", tokens,
            *sets(steps=4, batch=4, num_landmarks=8, intermediate_size=96)]  # fmt: skip
    told = invoke(*train, *more, "--time-limit", 0)
    assert (told.exit_code, "Stopped at step 1 (time limit)" in told.output) == (0, True)
    assert invoke(*train, *more).exit_code == cli.BAD_INPUT  # neither new nor --resume
    assert invoke(*train, "--resume").exit_code == 0  # what it was made of is written down
    again = sets(evaluation_batch=2, batch=4)
    told = invoke(*train, "--eval-only", *again)
    assert told.exit_code == 0
    assert "mlm nystrom: validation-32  loss " in told.output  # it is no step of training
    assert "step" not in told.output
    trained, scored = records.read(output / "rows.jsonl")
    settings = ["steps=4", "batch=4", "num_landmarks=8", "intermediate_size=96"]
    assert trained["steps"] == 4
    assert trained["settings"] == " ".join(settings)  # a table must not hide them
    assert scored["settings"] == " ".join([*settings, "evaluation_batch=2"])
    assert trained["options"] == {"num_landmarks": 8, "conv_kernel": 33}
    assert scored["metrics"] == {
        name: pytest.approx(values, rel=1e-6) for name, values in trained["metrics"].items()
    }
    wrong = invoke("train", "mlm", "--method", "yoso", "--output", output, "--resume")
    assert wrong.exit_code == cli.BAD_INPUT
    assert "output must be of mlm with yoso" in " ".join(wrong.output.split())
    kept = (output / "run.json").read_text()
    assert json.loads(kept)["method"] == "nystrom"
    for words, said in (
        (["--resume", *sets(hidden_size=32)], "settings and data must be those of"),
        (["--resume", "--size", "base"], "size and protocol must be those of the run"),
        (["--resume", *sets(compile="no")], "compile must be true or false, got 'no'"),
        (more, "output must be a new folder, or give --resume"),
    ):
        wrong = invoke(*train, *words)
        assert (wrong.exit_code, said in " ".join(wrong.output.split())) == (cli.BAD_INPUT, True)
        assert (output / "run.json").read_text() == kept
    assert invoke(*train, *more, "--resume").exit_code == 0


def test_what_was_typed_wrong_is_one_sentence(invoke, tmp_path):
    for arguments, words in (
        (("train", "glue/mrcp"), "did you mean 'glue/mrpc'"),
        (("train", "mlm", "--method", "yosso"), "did you mean 'yoso'"),
        (("train", "mlm", "--set", "stepss=3"), "did you mean 'steps'"),
        (("train", "mlm", "--set", "learning_rate=fast"), "learning_rate must be a number of at"),
        (("train", "mlm", "--set", "warmup=-3"), "warmup must be a number of at least 0, got -3"),
        (("train", "mlm", "--set", "length=9"), "length must be given by --length"),
        (("train", "mlm", "--output", tmp_path / "no", "--eval-only"), "of a finished run"),
        (("train", "glue/rte", "--start", tmp_path), "start must be the folder of a trained"),
        (("train", "mlm", "--start", tmp_path, "--size", "tiny"), "size must be left out"),
        (("arena", "--task", "lra/tekst"), "did you mean 'lra/text'"),
        (("advise", "--length", "64", "--dtype", "fp16"), "dtype must be one of 'float32'"),
        (("advise", "--length", "64", "--device", "gpu"), "device must be one of cpu, cuda"),
        (("train", "mlm", "--data-dir", tmp_path / "nowhere"), "which does not exist"),
        (("tokenize", tmp_path, "--output", tmp_path / "x"), "data_dir must hold .parquet or"),
        (("sweep", "mlm", "--data-dir", tmp_path, "--vary", "hashes=1,2"), "got 'hashes'"),
        (("sweep", "mlm", "--data-dir", tmp_path, "--vary", "hash_bits"), "--vary must be name="),
    ):
        told = invoke(*arguments)
        assert told.exit_code == cli.BAD_INPUT, arguments
        assert words in " ".join(told.output.split())
        assert "Traceback" not in told.output


def test_tasks_are_listed_with_what_judges_them(invoke):
    told = invoke("tasks").output
    for name, best in (("mlm-sop", "loss"), ("glue/cola", "matthews"), ("imdb", "accuracy")):
        assert any(name in line and best in line for line in told.splitlines())


def test_without_the_extra_the_command_says_what_to_install(invoke, monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name="accelerate")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    told = invoke("train", "mlm")
    assert told.exit_code == cli.BAD_INPUT
    assert "training needs accelerate: pip install 'longspan[train]'" in told.output
