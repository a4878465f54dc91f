import builtins
import io
import itertools

import pytest
import torch
from rich.console import Console

import longspan
from longspan import demo, records
from longspan.demo import timing, training
from longspan.demo.model import Reader
from longspan.demo.task import MIN_LENGTH, NUM_TOPICS, NUM_WORDS, QUESTION, documents


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_labels_follow_from_the_tokens():
    """An answer is the word most used by the tokens of its topic, counted one by one."""
    batch = documents(20, 1024, generator())
    for topics, words, padding, labels in zip(*batch, strict=True):
        count = torch.zeros(NUM_TOPICS, NUM_WORDS)
        for topic, word, absent in zip(topics.tolist(), words.tolist(), padding, strict=True):
            if not absent and word != QUESTION:
                count[topic, word] += 1
        asked = topics[:NUM_TOPICS]
        assert torch.equal(count[asked].argmax(1), labels)


def test_documents_are_questions_then_one_paragraph_per_topic():
    batch = documents(20, 1024, generator())
    assert (batch.words[:, :NUM_TOPICS] == QUESTION).all()
    assert (batch.words[:, NUM_TOPICS:] < NUM_WORDS).all()
    for topics, padding in zip(batch.topics, batch.padding, strict=True):
        body = topics[~padding][NUM_TOPICS:]
        assert sorted(body.unique_consecutive().tolist()) == list(range(NUM_TOPICS))
        sizes = body.unique_consecutive(return_counts=True)[1]
        assert sizes.max() <= 3 * sizes.min() + 4
        assert sorted(topics[:NUM_TOPICS].tolist()) == list(range(NUM_TOPICS))


def test_documents_vary_in_length_and_padding_comes_last():
    batch = documents(50, 1000, generator())
    lengths = (~batch.padding).sum(1)
    assert 500 <= lengths.min() < 600
    assert 900 < lengths.max() <= 1000
    assert torch.equal(batch.padding.sort(1).values, batch.padding)


def test_same_seed_same_documents():
    for one, two in zip(
        documents(3, 256, generator(5)), documents(3, 256, generator(5)), strict=True
    ):
        assert torch.equal(one, two)
    assert not torch.equal(documents(3, 256, generator(5))[1], documents(3, 256, generator(6))[1])


def test_too_short_documents_are_refused():
    documents(1, MIN_LENGTH, generator())
    with pytest.raises(ValueError, match="length must be at least"):
        documents(1, MIN_LENGTH - 1, generator())


def test_answers_are_spread_over_all_words():
    counts = documents(400, MIN_LENGTH, generator()).labels.flatten().bincount(minlength=NUM_WORDS)
    assert counts.min() > 0.7 * counts.float().mean()


@pytest.mark.parametrize("method", longspan.METHODS)
def test_reader_ignores_padding(method):
    options = demo.recipe(256, batch=2, steps=1, num_checks=1, held_out=2, budget=1).options
    torch.manual_seed(0)
    model = Reader(method, length=256, **options.get(method, {})).eval()
    topics, words, padding, _ = documents(2, 256, generator())
    with torch.no_grad():
        first = model(topics, words, padding)
        second = model(
            topics.masked_fill(padding, 3), words.masked_fill(padding, QUESTION), padding
        )
    assert first.shape == (2, NUM_TOPICS, NUM_WORDS)
    torch.testing.assert_close(first, second)


def test_readers_really_use_their_method():
    """In eval mode torch's encoder layer has a shortcut that would compute softmax for all."""
    outputs = {}
    topics, words, padding, _ = documents(2, 512, generator())
    for method in ("softmax", "window"):
        torch.manual_seed(0)
        model = Reader(method, length=512).eval()
        with torch.no_grad():
            outputs[method] = model(topics, words, padding)
    assert (outputs["softmax"] - outputs["window"]).abs().max() > 1e-3


def test_readers_of_one_seed_share_their_weights():
    weights = []
    for method in ("softmax", "yoso"):
        torch.manual_seed(3)
        weights.append(Reader(method, length=128).state_dict())
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_training_learns_and_counts_only_its_own_seconds():
    recipe = demo.recipe(256, batch=8, steps=60, num_checks=3, held_out=32, budget=60)
    rows = list(training.train("softmax", recipe, seed=0, device="cpu"))
    assert [row["step"] for row in rows if row["accuracy"] is not None] == [20, 40, 60]
    assert rows[-1]["accuracy"] > 0.6 > 4 * rows[-1]["chance"]
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert all(a["seconds"] < b["seconds"] for a, b in itertools.pairwise(rows))


@pytest.fixture
def quick(monkeypatch):
    """The demo with sizes that take a second."""
    plan = timing.Plan(lengths=(128, 256), budget=20, patience=5, column=0)
    recipe = demo.recipe(128, batch=2, steps=2, num_checks=1, held_out=2, budget=20)
    monkeypatch.setattr(demo, "QUICK_TIMING", plan)
    monkeypatch.setattr(demo, "QUICK_TRAINING", recipe)


def run(tmp_path, **arguments):
    out = io.StringIO()
    console = Console(file=out, width=160)
    code = demo.run(tmp_path, quick=True, console=console, **arguments)
    return code, out.getvalue(), records.read(tmp_path / "rows.jsonl")


def test_demo_runs_to_its_end(tmp_path, quick):
    code, text, rows = run(tmp_path, command="longspan demo --quick")
    assert code == 0
    kinds = [row["kind"] for row in rows]
    assert kinds[0] == "run"
    assert kinds[-1] == "end"
    timed = {(row["method"], row["mode"]) for row in rows if row["kind"] == "timing"}
    assert {method for method, _ in timed} == set(longspan.METHODS)
    trained = [row["method"] for row in rows if row["kind"] == "training"]
    assert list(dict.fromkeys(trained)) == ["softmax", "yoso", "nystrom", "linformer", "window"]
    assert "Left out to keep it short: strided, reformer, yoso_expectation" in text
    assert str((tmp_path / "index.html").resolve()) in text
    assert "longspan demo --quick" in (tmp_path / "index.html").read_text()


def test_demo_with_one_method_keeps_exact_attention(tmp_path, quick):
    _, text, rows = run(tmp_path, methods=["nystrom"])
    assert {row["method"] for row in rows if "method" in row} == {"softmax", "nystrom"}
    assert "linformer" not in text


def test_a_method_too_slow_is_stopped_and_said_so(tmp_path, quick, monkeypatch):
    plan = timing.Plan(lengths=(128, 256), budget=20, patience=0, column=0)
    monkeypatch.setattr(demo, "QUICK_TIMING", plan)
    _, text, rows = run(tmp_path, methods=["nystrom"])
    stopped = {(row["method"], row["length"]) for row in rows if row["kind"] == "stopped"}
    assert stopped == {("softmax", 256), ("nystrom", 256)}
    assert "stopped" in text


def test_training_out_of_time_is_cut_and_said_so(tmp_path, quick, monkeypatch):
    recipe = demo.recipe(128, batch=2, steps=5, num_checks=5, held_out=2, budget=0)
    monkeypatch.setattr(demo, "QUICK_TRAINING", recipe)
    _, text, rows = run(tmp_path, methods=["nystrom"])
    assert [row["step"] for row in rows if row["kind"] == "training"] == [1, 1]
    assert "out of time" in text


@pytest.mark.parametrize("where", ["timing", "training"])
def test_ctrl_c_leaves_rows_and_a_page(tmp_path, quick, monkeypatch, where):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    if where == "timing":
        build = timing.Case.build
        monkeypatch.setattr(
            timing.Case, "build", lambda c, mode: interrupt() if c.length > 128 else build(c, mode)
        )
    else:
        monkeypatch.setattr(training, "evaluate", interrupt)
    code, text, rows = run(tmp_path)
    assert code == 130
    assert "Stopped by Ctrl-C" in text
    kinds = {row["kind"] for row in rows}
    assert "timing" in kinds
    assert "end" not in kinds
    assert ("training" in kinds) == (where == "training")
    assert "was stopped before its end" in (tmp_path / "index.html").read_text()


def test_without_the_report_extra_one_sentence_says_how_to_get_it(tmp_path, quick, monkeypatch):
    real = builtins.__import__

    def without_jinja(name, *rest):
        if name == "jinja2":
            raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_jinja)
    code, text, _ = run(tmp_path, methods=["nystrom"])
    assert code == 0
    assert "pip install 'longspan[report]'" in text
    assert not (tmp_path / "index.html").exists()


def test_page_shows_this_run_alone(tmp_path, quick):
    run(tmp_path, command="first")
    _, _, rows = run(tmp_path, command="second", methods=["nystrom"])
    page = (tmp_path / "index.html").read_text()
    assert [row["command"] for row in rows if row["kind"] == "run"] == ["first", "second"]
    assert "<code>second</code>" in page
    assert "<code>first</code>" not in page
    assert 'data-method="yoso"' not in page
