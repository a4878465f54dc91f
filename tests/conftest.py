"""Seeds, and a reason that prints where a GPU test cannot run."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# cuBLAS reads it when it starts; torch's deterministic mode asks for it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Without a GPU, Triton's kernels run in its interpreter, which it decides when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A GPU machine's own Python may lack these: what needs them is left out; the header says so.
NEEDS = {
    "transformers": ["huggingface", "models", "test_examples.py", "test_readme.py"],
    "accelerate": ["tasks", "training"],
    "pyarrow": ["tasks", "training"],
}
missing = [name for name in NEEDS if not find_spec(name)]
collect_ignore = sorted({path for name in missing for path in NEEDS[name]})


def pytest_report_header():
    if collect_ignore:
        return f"{', '.join(missing)} not installed: left out {', '.join(collect_ignore)}"
    return None


# The tensors here are small: a second thread costs more in waiting than it gives.
# Tests never ask the network: what is not in the cache is not at hand.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--kernels", type=Path, help="another build of the CPU kernels to test")
    parser.addoption("--part", default="1/1", help="i/n: the i-th of n that share the tests")


def pytest_configure(config):
    if config.getoption("--kernels"):
        from longspan.attention.yoso import library

        library.use(config.getoption("--kernels").resolve(strict=True))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _emulated(request):
    """YOSO's kernels for GPUs, on a CPU, for the tests that are marked so."""
    if request.node.get_closest_marker("emulated") is None:
        yield
        return
    import emulator

    with emulator.installed(emulator.launcher):
        yield


@pytest.fixture(autouse=True)
def _give_memory_back():
    """Of a GPU, that the tests of other processes need: torch would keep what a test has freed."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 1 << 30:
        torch.cuda.empty_cache()


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config, items):
    part, parts = map(int, config.getoption("--part").split("/"))
    items[:] = items[part - 1 :: parts]
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)
    if emulated := [item for item in items if item.get_closest_marker("emulated")]:
        from emulator import missing

        for item in emulated:
            item.add_marker(pytest.mark.skipif(missing() is not None, reason=str(missing())))
