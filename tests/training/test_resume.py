import os
import signal
import subprocess
import sys
import time

import pytest
import runs
import torch
from safetensors.torch import load_file

from longspan import records
from longspan.tasks import find
from longspan.training import callbacks
from longspan.training.run import FINISHED, STOPPED
from longspan.training.trainer import Rows, last_checkpoint

TRAINING = {"steps": 14, "hidden_dropout_prob": 0.1, "evaluate_every": 2}


def weights(output):
    return load_file(output / "model" / "model.safetensors")


def stop_after(monkeypatch, batches, number):
    """Send ourselves a signal when so many batches have been made for training."""
    original, made = Rows.__getitems__, []

    def counted(self, numbers):
        made.append(numbers)
        if len(made) == batches:
            os.kill(os.getpid(), number)
        return original(self, numbers)

    monkeypatch.setattr(Rows, "__getitems__", counted)


@pytest.mark.parametrize(
    ("method", "number", "more"),
    [
        ("softmax", signal.SIGTERM, {}),
        ("softmax", signal.SIGINT, {}),
        ("yoso", signal.SIGTERM, {}),
        ("yoso", signal.SIGINT, {}),
        ("softmax", signal.SIGTERM, {"schedule": "one_cycle", "warmup": 4}),
    ],
    ids=["softmax-SIGTERM", "softmax-SIGINT", "yoso-SIGTERM", "yoso-SIGINT", "one_cycle"],
)
def test_a_stopped_run_continues_bit_for_bit(method, number, more, data, tmp_path, monkeypatch):
    # Fourteen steps are two epochs of six and a part of a third: order and masks of each count.
    rows = find("mlm").load(data / "corpus", length=32, device="cpu").train
    batch = len(rows) // 6
    training = {**TRAINING, **more, "batch": batch}
    whole = runs.make("mlm", method, data, tmp_path / "whole", **training)
    expected = runs.silent(whole)
    parts = runs.make("mlm", method, data, tmp_path / "parts", **training)
    with monkeypatch.context() as patch:
        stop_after(patch, 8, number)
        stopped = runs.silent(parts)
    assert (stopped.status, stopped.signal) == (STOPPED, number)
    assert 0 < stopped.step < 14
    assert not (tmp_path / "parts" / "rows.jsonl").exists()
    found = runs.silent(parts, resume=True)
    assert found.status == FINISHED
    assert found.row["metrics"] == expected.row["metrics"]
    assert found.row["curve"] == expected.row["curve"]
    one, two = weights(whole.output), weights(parts.output)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_signal_that_comes_twice_is_one(data, tmp_path, monkeypatch):
    """As `timeout` sends it: to a process, and to its group."""
    run = runs.make("mlm", "softmax", data, tmp_path)
    for _ in range(2):
        stop_after(monkeypatch, 4, signal.SIGTERM)
    stopped = runs.silent(run)
    assert (stopped.status, stopped.signal) == (STOPPED, signal.SIGTERM)
    assert last_checkpoint(tmp_path) is not None


def test_a_second_signal_ends_at_once(data, tmp_path, monkeypatch):
    monkeypatch.setattr(callbacks, "ONE_SIGNAL", -1.0)
    run = runs.make("mlm", "softmax", data, tmp_path)
    for _ in range(2):
        stop_after(monkeypatch, 4, signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            runs.silent(run)
    finally:
        signal.signal(signal.SIGINT, before)
    assert last_checkpoint(tmp_path) is None


def test_an_evaluation_that_a_stop_skipped_is_made_up_for(data, tmp_path, monkeypatch):
    curves = []
    for name in ("whole", "parts"):
        run = runs.make("mlm", "softmax", data, tmp_path / name, evaluate_every=1)
        if name == "parts":
            with monkeypatch.context() as patch:
                stop_after(patch, 5, signal.SIGTERM)
                assert runs.silent(run).status == STOPPED
        curves.append(runs.silent(run, resume=True).row["curve"])
    assert [point["step"] for point in curves[0]] == list(range(1, 11))
    assert curves[0] == curves[1]


def test_a_run_killed_after_its_last_step_makes_no_other(data, tmp_path):
    run = runs.make("mlm", "softmax", data, tmp_path, save_every=5, evaluate_every=5)
    row = runs.silent(run).row
    (tmp_path / "rows.jsonl").unlink()
    again = runs.silent(run, resume=True).row
    assert again["steps"] == row["steps"] == 10
    for name in ("metrics", "curve", "best"):
        assert again[name] == row[name]


def test_a_time_limit_stops_with_a_checkpoint(data, tmp_path):
    run = runs.make("mlm", "softmax", data, tmp_path)
    outcome = runs.silent(run, time_limit=0.0)
    assert (outcome.status, outcome.reason, outcome.step) == (STOPPED, "time limit", 1)
    assert last_checkpoint(tmp_path).name == "checkpoint-1"
    with pytest.raises(FileExistsError, match="output must be a new folder, or give --resume"):
        runs.silent(run)


def test_a_checkpoint_that_is_not_whole_is_not_read(data, tmp_path):
    run = runs.make("mlm", "softmax", data, tmp_path, save_every=4)
    assert runs.silent(run).status == FINISHED
    assert last_checkpoint(tmp_path).name == "checkpoint-10"
    (tmp_path / "checkpoint-10" / "journal.json").unlink()
    assert last_checkpoint(tmp_path).name == "checkpoint-8"
    half = tmp_path / "checkpoint-12"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert last_checkpoint(tmp_path).name == "checkpoint-8"


@pytest.mark.slow
def test_kill_9_and_resume_end_with_the_same_loss(data, tmp_path):
    settings = ["steps=80", "batch=16", "save_every=5", "vocab_size=100", "num_hashes=8",
                "evaluate_every=80", "log_every=5"]  # fmt: skip
    command = [sys.executable, "-m", "longspan", "train", "mlm", "--method", "yoso",
               "--size", "tiny", "--length", "32", "--data-dir", str(data / "corpus"),
               *(word for setting in settings for word in ("--set", setting))]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    process = subprocess.Popen(
        [*command, "--output", str(parts)], env=environment, stdout=subprocess.DEVNULL
    )
    deadline = time.time() + 60
    while last_checkpoint(parts) is None and time.time() < deadline:
        time.sleep(0.02)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (parts / "rows.jsonl").exists()
    for output, more in ((parts, ["--resume"]), (whole, [])):
        run = [*command, "--output", str(output), *more]
        subprocess.run(run, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=120)
    (one,), (two,) = (records.read(folder / "rows.jsonl") for folder in (whole, parts))
    assert one["metrics"] == two["metrics"]
    assert one["steps"] == two["steps"] == 80
