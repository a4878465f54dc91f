"""What this machine can run, and why not."""

from __future__ import annotations

import os
import shutil
from importlib import metadata

import torch

import longspan
from longspan import records
from longspan.attention.yoso import library

EXTRAS = {
    "cuda": ("triton", "cuda-core"),
    "huggingface": ("transformers", "safetensors"),
    "train": (
        "transformers",
        "accelerate",
        "tokenizers",
        "safetensors",
        "pyarrow",
        "datasets",
        "tensorboard",
    ),
    "report": ("plotly", "jinja2", "matplotlib"),
}
COMPILERS = ("c++", "g++", "clang++", "cl")


def examine() -> dict[str, list[str]]:
    """Findings as plain sentences, by topic."""
    return {
        "Versions": _versions(),
        "Machine": _machine(),
        "Optional extras": [_extra(name, packages) for name, packages in EXTRAS.items()],
        "C++ compiler": [_compiler()],
        "CPU kernels": [_kernels()],
        **{f"Methods on {device}": _implementations(device) for device in devices()},
    }


def devices() -> list[str]:
    """Names of the devices torch can use here, the CPU first."""
    names = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return names + ["mps"] * torch.backends.mps.is_available()


def _versions() -> list[str]:
    stamp = records.environment()
    return [f"{name} {stamp[name]}" for name in ("longspan", "torch", "python")]


def _machine() -> list[str]:
    stamp = records.environment()
    lines = [
        stamp["platform"],
        f"{stamp['cpu']}: {stamp['cores']} cores, torch uses {stamp['threads']} threads",
    ]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}: {card.name}, {card.total_memory / 2**30:.0f} GiB")
    if not torch.cuda.is_available():
        why = "finds none" if torch.version.cuda else "was built without CUDA"
        lines.append(f"no NVIDIA GPU in use: torch {why}")
    return lines


def _extra(name: str, packages: tuple[str, ...]) -> str:
    missing = [package for package in packages if not _installed(package)]
    if not missing:
        return f"{name}: installed"
    return f"{name}: {', '.join(missing)} missing; pip install 'longspan[{name}]'"


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _compiler() -> str:
    names = (os.environ.get("CXX", ""), *COMPILERS)
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    return f"found: {found}" if found else f"none found (looked for {', '.join(COMPILERS)})"


def _kernels() -> str:
    missing = library.missing
    return f"none: {missing}" if missing else f"built, on {library.instructions()} instructions"


def _implementations(device: str) -> list[str]:
    """What impl="auto" would choose on a device, for each method."""
    width = max(map(len, longspan.METHODS))
    lines = []
    for name, method in longspan.METHODS.items():
        if method.why_not_fused is None:
            choice = "the only implementation, in plain torch"
        elif reasons := method.why_not_fused(torch.device(device)):
            choice = f"reference: {'; '.join(reasons)}"
        else:
            choice = "fused"
        lines.append(f"{name:<{width}}  {choice}")
    return lines
