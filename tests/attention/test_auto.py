"""`attention(method="auto")`: exact unless another method is allowed, and only where it pays."""

from pathlib import Path

import pytest
import torch

import longspan
from longspan import records
from longspan.attention import auto
from longspan.report.crossover import crossovers


@pytest.fixture
def qkv():
    return [torch.randn(2, 2, 40, 8) for _ in range(3)]


@pytest.fixture
def table(monkeypatch):
    made = {
        "cpu": {"forward": {"nystrom": 30, "window": None}, "forward+backward": {"nystrom": 50}}
    }
    monkeypatch.setattr(auto, "CROSSOVERS", made)


def equal(a, b):
    return torch.equal(a, b)


def test_without_consent_it_is_exact_at_any_length(table, qkv):
    assert equal(longspan.attention(*qkv, method="auto"), longspan.softmax(*qkv))
    y = longspan.attention(*qkv, method="auto", scale=0.1)
    assert equal(y, longspan.softmax(*qkv, scale=0.1))


def test_from_the_crossover_on_it_is_what_was_allowed(table, qkv):
    options = {"approximate": "nystrom", "num_landmarks": 4}
    y = longspan.attention(*qkv, method="auto", **options)
    assert equal(y, longspan.nystrom(*qkv, num_landmarks=4))
    short = [x[:, :, :29] for x in qkv]
    assert equal(longspan.attention(*short, method="auto", **options), longspan.softmax(*short))


def test_training_has_its_own_crossover(table, qkv):
    options = {"approximate": "nystrom", "num_landmarks": 4}
    for x in qkv:
        x.requires_grad_()
    y = longspan.attention(*qkv, method="auto", **options)
    assert equal(y, longspan.softmax(*qkv))
    with torch.no_grad():
        y = longspan.attention(*qkv, method="auto", **options)
    assert equal(y, longspan.nystrom(*qkv, num_landmarks=4))


@pytest.mark.parametrize("method", ["window", "strided"])
def test_what_was_never_faster_or_never_measured_is_not_used(table, qkv, method):
    y = longspan.attention(*qkv, method="auto", approximate=method)
    assert equal(y, longspan.softmax(*qkv))


def test_the_user_may_say_from_where(table, qkv):
    window = {"approximate": "window", "window": 3}
    y = longspan.attention(*qkv, method="auto", exact_below=40, **window)
    assert equal(y, longspan.window(*qkv, window=3))
    y = longspan.attention(*qkv, method="auto", exact_below=41, **window)
    assert equal(y, longspan.softmax(*qkv))
    y = longspan.attention(*qkv, method="auto", exact_below=0, **window)
    assert equal(y, longspan.window(*qkv, window=3))


def test_scale_holds_on_either_side(table, qkv):
    for exact_below, expected in ((0, longspan.nystrom), (99, longspan.softmax)):
        y = longspan.attention(
            *qkv, method="auto", approximate="nystrom", exact_below=exact_below, scale=0.3
        )
        assert equal(y, expected(*qkv, scale=0.3))


def test_masks_are_honoured(table, qkv):
    mask = torch.arange(40) < torch.tensor([[40], [20]])
    y = longspan.attention(*qkv, method="auto", approximate="nystrom", key_mask=mask)
    assert equal(y, longspan.nystrom(*qkv, key_mask=mask))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"approximate": "nystorm"}, ValueError, "approximate must be one of .* mean 'nystrom'"),
        ({"approximate": "softmax"}, ValueError, "approximate must be one of"),
        ({"exact_below": 9}, ValueError, "approximate must name a method"),
        ({"approximate": "nystrom", "exact_below": -1}, ValueError, "exact_below must be"),
        ({"approximate": "nystrom", "landmarks": 9}, TypeError, "num_landmarks"),
        ({"num_landmarks": 9}, TypeError, "options of softmax must be among"),
        ({"is_causal": True}, NotImplementedError, "is_causal cannot be honoured"),
        ({"is_causal": True, "approximate": "yoso"}, NotImplementedError, "is_causal cannot"),
    ],
)
def test_errors_come_at_any_length(table, qkv, options, error, words):
    """A mistyped option of the approximation is an error even where exact attention is used."""
    short = [x[:, :, :5] for x in qkv]
    with pytest.raises(error, match=words):
        longspan.attention(*short, method="auto", **options)


def test_it_compiles_whole(table, qkv):
    def run(q, k, v):
        return longspan.attention(q, k, v, method="auto", approximate="nystrom", num_landmarks=4)

    y = torch.compile(run, fullgraph=True, backend="eager")(*qkv)
    torch.testing.assert_close(y, longspan.nystrom(*qkv, num_landmarks=4))


def test_the_table_names_methods():
    for modes in auto.CROSSOVERS.values():
        assert set(modes) == {"forward", "forward+backward"}
        for methods in modes.values():
            assert set(methods) <= set(longspan.METHODS) - {"softmax"}


@pytest.mark.parametrize(("device", "folder"), [("cpu", "cpu"), ("cuda", "h200")])
def test_the_table_is_read_off_the_rows(device, folder):
    """Where it fails, the rows have changed: write what they say into `CROSSOVERS`."""
    path = Path(__file__).parents[2] / "results" / folder / "rows.jsonl"
    rows = records.read(path) if path.exists() else []
    assert auto.CROSSOVERS[device] == crossovers(rows, device)
