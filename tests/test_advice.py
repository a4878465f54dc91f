"""`longspan advise`: one sentence that follows from rows, and rows that are measured once."""

import pytest

from longspan import advice, records
from longspan.advice import Question, advise
from longspan.attention import auto
from longspan.bench.suite import Limits, Setting

LENGTHS = (512, 1024, 2048, 4096)


def timing(name, seconds, mode="forward", **more):
    shape = {"heads": 8, "head_dim": 64, "batch": 1, "dtype": "float32", "device": "cpu"}
    stamp = {"cpu": "A CPU", "cores": 2, "gpu": None}
    about = {"kind": "timing", "suite": "length", "mode": mode, "environment": stamp}
    method = name.partition("-")[0]
    return [
        {**about, **shape, "name": name, "method": method, "length": n, "seconds": t, **more}
        for n, t in seconds.items()
    ]


def error(method, options, value, inputs="real", length=512, heads=8):
    about = {"kind": "error", "inputs": inputs, "name": method, "length": length}
    about |= {"heads": heads, "head_dim": 64}
    return {**about, "method": method, "options": options, "error_softmax": value}


def rows(crossing=1500.0):
    exact = {n: 1e-8 * n**2 for n in LENGTHS}
    return [
        *timing("softmax", exact),
        *timing("nystrom-64", {n: 1e-8 * crossing * n for n in LENGTHS}),
        *timing("nystrom-32", {n: 0.5e-8 * crossing * n for n in LENGTHS}),
        *timing("softmax", dict.fromkeys(LENGTHS, 9.0), mode="forward+backward"),
        error("nystrom", {"num_landmarks": 64}, 0.4),
        error("nystrom", {"num_landmarks": 32}, 0.5),
        error("nystrom", {"num_landmarks": 64}, 0.9, inputs="clustered"),
    ]


def test_the_nearest_that_pays_is_named_with_its_crossover_and_error():
    answer = advise(Question(4096), rows())
    assert answer.sentence.startswith(
        "At 4,096 tokens (inference, 8 heads of 64, float32, A CPU, 2 cores) nystrom-64 pays: it "
        "is 2.7× as fast as exact attention, faster from about 1,500 tokens on, with an error of "
        "40% on real inputs before any training; the fastest, nystrom-32, is 5.5× as fast"
    )
    assert answer.call == (
        'longspan.attention(q, k, v, method="auto", approximate="nystrom", num_landmarks=64, '
        "exact_below=1500)"
    )
    assert [option.name for option in answer.options] == ["nystrom-32", "nystrom-64"]


def test_exact_attention_is_said_to_be_right_where_it_is():
    answer = advise(Question(512), rows())
    assert (
        "exact attention is the right choice: nystrom-32, the fastest other, takes 1.46× its"
        in (answer.sentence)
    )
    assert "overtakes it at about 750" in answer.sentence
    assert answer.call == "longspan.softmax(q, k, v)"


def test_a_small_gain_is_not_worth_an_error():
    answer = advise(Question(1024), rows(crossing=1900.0))
    assert "exact attention is the right choice" in answer.sentence
    assert "is only 1.08× as fast" in answer.sentence


def test_between_lengths_and_beyond_them():
    answer = advise(Question(3000), rows())
    by_name = {option.name: option for option in answer.options}
    assert by_name["nystrom-64"].ratio == pytest.approx(2.0)  # power laws interpolate exactly
    assert not by_name["nystrom-64"].extrapolated
    beyond = advise(Question(8192), rows())
    assert beyond.options[0].extrapolated
    assert beyond.options[1].ratio == pytest.approx(8192 / 1500)
    assert "(extrapolated)" in beyond.sentence


def test_rows_of_another_shape_or_mode_do_not_answer():
    for question in (Question(4096, heads=4), Question(4096, dtype="bfloat16")):
        with pytest.raises(ValueError, match="rows must hold times of softmax and of other"):
            advise(question, rows())
    with pytest.raises(ValueError, match=r"forward\+backward"):
        advise(Question(4096, train=True), rows())


def test_earlier_questions_do_not_change_an_answer():
    known = [row for row in rows() if row["kind"] == "timing"]
    options = {"num_landmarks": 64}
    known += [error("nystrom", options, 0.7, "clustered", 1024),
              error("nystrom", options, 0.1, "clustered", 64),
              error("nystrom", options, 0.0, "clustered", 1024, heads=1)]  # fmt: skip
    first = advise(Question(2048), known)
    assert {option.error for option in first.options} == {0.7, None}
    narrow = timing("softmax", {2048: 1e-9}, dtype="bfloat16")
    assert advise(Question(2048, dtype="float32", device="cpu"), [*known, *narrow]) == first
    elsewhere = timing("softmax", {2048: 1e-9}, device="cuda")
    assert advise(Question(2048, dtype="float32", device="cpu"), [*known, *elsewhere]) == first


def test_a_device_that_is_not_here_is_answered_from_the_table(monkeypatch):
    table = {"cuda": {"forward": {"yoso": 3000, "window": None}, "forward+backward": {}}}
    monkeypatch.setattr(auto, "CROSSOVERS", table)
    assert "yoso from 3,000 tokens on" in advice.from_table(Question(4096), "cuda")
    assert "exact attention is the right choice" in advice.from_table(Question(2048), "cuda:1")
    assert "none was measured" in advice.from_table(Question(2048, train=True), "cuda")


def test_what_is_measured_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setattr(advice, "LIMITS", Limits(0.0, 60.0, 600.0))
    question = Question(128, heads=2, head_dim=8, train=True)
    said = []
    found = advice.measured(question, Setting(), tmp_path / "rows.jsonl", say=said.append)
    assert {row["length"] for row in found if row["kind"] == "timing"} == {64, 128}
    assert {row["mode"] for row in found if row["kind"] == "timing"} == {"forward+backward"}
    assert advise(question, found).sentence
    again = advice.measured(question, Setting(), tmp_path / "rows.jsonl", say=said.append)
    assert again == found == records.read(tmp_path / "rows.jsonl")
    assert said[-1].startswith("0 rows to measure")
