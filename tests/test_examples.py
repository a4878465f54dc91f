"""Every example runs as its first lines say, on tiny models, and stays short."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import transformers
import zoo

from longspan.tasks.lra import pathfinder
from longspan.tasks.lra.splits import save

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run an example as a script in this process; return what it printed."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_convert_encoder(run):
    out = run("convert_encoder.py", "--tiny")
    assert "BertModel at 600 tokens" in out
    assert "ModernBertModel at 600 tokens" in out
    errors = [float(x) for x in re.findall(r"alone by (\S+)", out)]
    assert len(errors) == 2
    assert max(errors) < 1e-4


def test_convert_encoder_with_a_checkpoint(run, tmp_path):
    zoo.make("roberta").save_pretrained(tmp_path)
    out = run("convert_encoder.py", tmp_path, "--tiny", "--method", "window")
    assert "RobertaModel at 600 tokens" in out


def test_convert_vit(run):
    out = run("convert_vit.py", "--tiny")
    assert out.startswith("400 patches")
    assert len(re.findall(r"cosine of the embeddings [\d.]+", out)) == 3


def test_distill_brings_the_student_nearer_to_its_teacher(run):
    out = run("distill.py", "--tiny", "--steps", 40)
    before, after = (float(x) for x in re.findall(r"0\.\d{4}", out))
    assert 1 - after < 0.7 * (1 - before)


@pytest.mark.parametrize("kind", ["Nystromformer", "Yoso"])
def test_masked_lm(run, kind, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**zoo.SMALL | {"vocab_size": 11})
    folder = zoo.checkpoint(tmp_path, getattr(transformers, f"{kind}ForMaskedLM"), config)
    sentence, *answers = run("masked_lm.py", folder).splitlines()
    assert sentence == "Paris is the <mask> of France."
    assert len(answers) == 4
    assert len({line.split(": ")[1].strip() for line in answers}) == 1  # all agree


def test_masked_lm_says_what_is_missing(run):
    with pytest.raises(SystemExit, match="no-such-folder is neither a folder nor within reach"):
        run("masked_lm.py", "no-such-folder")


def test_minilm_on_another_bert(run, tmp_path):
    """The measurement runs on any BERT; test_minilm.py has the figures of the real one."""
    folder = zoo.checkpoint(tmp_path, transformers.BertModel, transformers.BertConfig(**zoo.SMALL))
    out = run("minilm.py", folder)
    assert re.search(r"softmax +1\.0000 +1\.000 +100%", out)
    assert len(out.splitlines()) == 10


def test_yoso_maps_come_nearer_with_more_hashes(run, tmp_path):
    out = run("yoso_maps.py", "--output", tmp_path)
    errors = [float(x) for x in re.findall(r"hashes: ([\d.]+)", out)]
    assert len(errors) == 4
    # 64 times the hashes: an eighth of the error, give or take the luck of two hashes.
    assert errors[-1] < errors[0] / 4
    fullest = [int(x) for x in re.findall(r": (\d+)$", out, re.MULTILINE)]
    assert fullest == sorted(fullest, reverse=True)
    assert {path.name for path in tmp_path.iterdir()} == {"yoso-maps.png", "yoso-buckets.png"}


def test_landmarks_and_projections_learn(run, tmp_path):
    out = run("landmarks_and_projections.py", "--output", tmp_path, "--steps", 40)
    few, many, before, after = (float(x) for x in re.findall(r"0\.\d{3}|1\.\d{3}", out))
    assert many < few < 0.6
    assert after < 0.75 * before
    assert {path.name for path in tmp_path.iterdir()} == {"landmarks.png", "projections.png"}


def test_pathfinder_cnn(run, tmp_path):
    made = pathfinder.make(tmp_path / "parts", 0, {"train": 60, "validation": 20, "test": 20})
    save(tmp_path / "lra-pathfinder.npz", made)
    out = run("pathfinder_cnn.py", "--data-dir", tmp_path, "--epochs", 2)
    assert len(re.findall(r"epoch \d: \d+\.\d% of validation", out)) == 2
    assert "% of the test pictures" in out


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_short_and_tested(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 80
    assert f'"{name}"' in Path(__file__).read_text()
