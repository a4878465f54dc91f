import json
import math
import sys
from pathlib import Path

import pytest
import torch

from longspan import records

PACKAGE = str(Path(records.__file__).resolve().parent)


def test_rows_come_back_in_order_with_a_stamp(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    for length in (512, 1024):
        records.append(path, {"method": "yoso", "length": length, "note": "τ = 8"})
    rows = records.read(path)
    assert [row["length"] for row in rows] == [512, 1024]
    assert rows[0]["note"] == "τ = 8"
    stamp = rows[0]["environment"]
    assert stamp["torch"] == str(torch.__version__)
    assert stamp["python"] == ".".join(map(str, sys.version_info[:3]))
    assert stamp["threads"] == torch.get_num_threads()
    assert stamp["cores"] >= 1
    assert stamp["time"].endswith("+00:00")


def test_append_returns_what_it_wrote(tmp_path):
    written = records.append(tmp_path / "rows.jsonl", {"seconds": 0.25})
    assert records.read(tmp_path / "rows.jsonl") == [written]


def test_broken_line_is_named_and_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2, "b\n\n[3]\n{"a": 4}\n{"a"')
    with pytest.warns(UserWarning, match="line") as caught:
        rows = records.read(path)
    assert rows == [{"a": 1}, {"a": 4}]
    numbers = [str(warning.message).partition("line ")[2][0] for warning in caught]
    assert numbers == ["2", "4", "6"]


def test_row_after_a_cut_off_line_survives(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": 2')
    records.append(path, {"a": 3})
    with pytest.warns(UserWarning, match="line 2"):
        assert [row["a"] for row in records.read(path)] == [1, 3]


@pytest.mark.parametrize("value", [math.nan, math.inf, object()], ids=["nan", "inf", "object"])
def test_what_json_cannot_hold_is_refused_and_writes_nothing(tmp_path, value):
    path = tmp_path / "rows.jsonl"
    with pytest.raises((TypeError, ValueError)):
        records.append(path, {"seconds": value})
    assert not path.exists()


def test_environment_is_plain_json():
    stamp = records.environment()
    assert json.loads(json.dumps(stamp)) == stamp


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("/usr/bin/longspan", "longspan"),
        (f"{PACKAGE}/__main__.py", "longspan"),
        (f"{PACKAGE}/bench/__main__.py", "python -m longspan.bench"),
        (f"{PACKAGE}/training/study.py", "python -m longspan.training.study"),
    ],
)
def test_the_command_is_what_was_typed(monkeypatch, program, words):
    monkeypatch.setattr("sys.argv", [program, "--set", "a b"])
    assert records.command() == f"{words} --set 'a b'"
