import os
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from longspan import records

SETTINGS = ("steps=8", "batch=16", "learning_rate=0.001", "hidden_dropout_prob=0", "log_every=1",
            "evaluate_every=4", "save_every=0", "num_landmarks=8")  # fmt: skip


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch has no gloo here")
def test_two_processes_are_as_one(data, tmp_path):
    command = ["-m", "longspan", "train", "mlm", "--method", "nystrom", "--size", "tiny",
               "--length", "32", "--data-dir", str(data / "corpus"),
               *(word for setting in SETTINGS for word in ("--set", setting))]  # fmt: skip
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2",
                "--master-port", str(free_port())]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    rows = {}
    for name, launcher, more in (
        ("one", [], ["accumulate=2"]),
        ("two", torchrun, []),
    ):
        extra = [word for setting in more for word in ("--set", setting)]
        output = ["--output", str(tmp_path / name)]
        run = [sys.executable, *launcher, *command, *extra, *output]
        subprocess.run(run, env=environment, check=True, capture_output=True, timeout=120)
        (rows[name],) = records.read(tmp_path / name / "rows.jsonl")
    assert [rows[name]["processes"] for name in rows] == [1, 2]
    # Two parts of a batch, accumulated by one process or averaged over two: the sums differ by
    # rounding, and Adam's first steps, which divide by the gradient's size, make no more of it than
    # of the learning rate.
    for one, two in zip(rows["one"]["curve"], rows["two"]["curve"], strict=True):
        assert one == pytest.approx(two, rel=1e-5)
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in rows)
    for key, weight in one.items():
        torch.testing.assert_close(weight, two[key], rtol=1e-4, atol=1e-5, msg=key)
