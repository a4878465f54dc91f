"""Several processes: each with all of the model, or with a shard of it."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longspan import records

SETTINGS = ("steps=8", "batch=16", "hidden_dropout_prob=0", "log_every=1")
STEADY = ("learning_rate=0.001", "evaluate_every=4", "save_every=4")
SHARDED = str(Path(__file__).with_name("sharded.py"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo here"),
]


def train(data, output, program, *more, processes=2, method="nystrom"):
    """Run `longspan train mlm`; its last row."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes),
                "--master-port", str(port)]  # fmt: skip
    command = [sys.executable, *(torchrun if processes > 1 else []), *program,
               "train", "mlm", "--method", method, "--size", "tiny", "--length", "32",
               "--data-dir", str(data / "corpus"), "--output", str(output)]  # fmt: skip
    own = ["num_landmarks=8"] if method == "nystrom" else []
    for word in (*SETTINGS, *own, *more):
        command += [word] if word.startswith("--") else ["--set", word]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return records.read(output / "rows.jsonl")[-1]


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes") / "one"
    return train(data, folder, ["-m", "longspan"], *STEADY, "accumulate=2", processes=1), folder


def as_one(row, folder, one):
    # Two parts of a batch, accumulated by one process or averaged over two: the sums differ by
    # rounding, and Adam's first steps, which divide by the gradient's size, make no more of it than
    # of the learning rate.
    expected, other = one
    assert (row["processes"], expected["processes"]) == (2, 1)
    for mine, its in zip(row["curve"], expected["curve"], strict=True):
        assert mine == pytest.approx(its, rel=1e-5)
    found = weights(folder)
    for key, weight in weights(other).items():
        torch.testing.assert_close(weight, found[key], rtol=1e-4, atol=1e-5, msg=key)


def test_two_processes_are_as_one(data, tmp_path, one):
    as_one(train(data, tmp_path / "two", ["-m", "longspan"], *STEADY), tmp_path / "two", one)


def test_two_processes_with_a_shard_each_are_as_one(data, tmp_path, one):
    folder = tmp_path / "shards"
    as_one(train(data, folder, [SHARDED], *STEADY), folder, one)
    assert (folder / "checkpoint-4" / "pytorch_model_fsdp_0").is_dir()
    shutil.rmtree(folder / "checkpoint-8")
    shutil.rmtree(folder / "model")
    as_one(train(data, folder, [SHARDED], *STEADY, "--resume"), folder, one)


def test_shards_of_the_best_weights_are_kept(data, tmp_path):
    row = train(data, tmp_path, [SHARDED], "learning_rate=0.2", "evaluate_every=2", "--keep-best")
    best = min(row["curve"], key=lambda point: point["loss"])
    assert best["step"] < row["steps"], "the last weights are the best: nothing was tested"
    assert row["metrics"]["validation-32"]["loss"] == pytest.approx(best["loss"], rel=1e-6)


def test_what_layers_share_is_sharded_with_the_model(data, tmp_path):
    row = train(data, tmp_path, [SHARDED], "sharing=layerwise", method="linformer")
    assert (row["processes"], row["steps"]) == (2, 8)
