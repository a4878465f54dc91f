"""`model`: a whole encoder, inference and training step, and an estimate of the largest batch.

Sizes: 6 layers of 256 channels, 4 heads and 1,024 in between (the YOSO paper's efficiency study),
and 12 layers of 768, 12 heads, 3,072 (BERT-base). A training step is forward, backward and AdamW,
on a GPU under bfloat16 autocast with float32 weights. Needs transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longspan.bench.cases import MODES, fastest_exact
from longspan.bench.length import NAMES
from longspan.bench.suite import EXACT, Call, Entry, Group, Setting

SIZES = {256: (6, 4, 1024), 768: (12, 12, 3072)}  # channels: layers, heads, in between
CHOSEN = (
    "softmax", "linformer-256", "window-257", "nystrom-64", "yoso-32", "yoso-16", "reformer",
)  # fmt: skip
VOCABULARY = 1024  # small: the encoder is what is timed
GPU_TOKENS = 1 << 14  # of a batch, or one sequence where it is longer


def groups(setting: Setting) -> Iterator[Group]:
    """Both sizes and modes, 512 tokens and up; a quick run on a CPU leaves out the larger."""
    lengths: tuple[int, ...] = (512, 1024, 4096, 16384) if setting.cuda else (512, 1024, 2048, 4096)
    lengths = lengths[:3] if setting.quick else lengths
    sizes = [256] if setting.quick and not setting.cuda else list(SIZES)
    for width in sizes:
        for length in setting.lengths or lengths:
            for mode in MODES:
                yield _group(width, length, mode, setting)


def _group(width: int, length: int, mode: str, setting: Setting) -> Group:
    layers, heads, _ = SIZES[width]
    batch = max(1, GPU_TOKENS // length) if setting.cuda else 1
    entries = []
    for name in CHOSEN:
        method, options = NAMES[name]
        about = {
            "mode": mode,
            "method": method,
            "options": options,
            "length": length,
            "batch": batch,
            "heads": heads,
            "head_dim": width // heads,
            "width": width,
            "layers": layers,
            "dtype": setting.dtype,
            "device": setting.device,
        }
        build = partial(_call, about, setting)
        extra = partial(_largest_batch, about, setting)
        entries.append(Entry(name, about, build, extra))
    series = f"{layers} layers of {width}, {mode}"
    return Group(f"{length:,} tokens, batch {batch}, {series}", entries, series, length, batch)


def encoder(about: dict[str, Any], seed: int, device: str) -> torch.nn.Module:
    """A longspan encoder of one of SIZES on a device, with weights drawn from `seed`."""
    from longspan.models import LongspanConfig, LongspanModel

    layers, heads, between = SIZES[about["width"]]
    options = dict(about["options"])
    if about["method"] == "yoso":
        options["exact_below"] = 0  # what is timed is the sampler
    config = LongspanConfig(
        vocab_size=VOCABULARY,
        hidden_size=about["width"],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=between,
        max_position_embeddings=about["length"],
        hidden_dropout_prob=0.0,
        method=about["method"],
        options=options,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        return LongspanModel(config)


def _call(about: dict[str, Any], setting: Setting) -> Call:
    call = _step(about, setting)
    return fastest_exact(call) if setting.cuda and about["method"] == EXACT else call


def _step(about: dict[str, Any], setting: Setting) -> Call:
    model = encoder(about, setting.seed, setting.device)
    generator = torch.Generator().manual_seed(setting.seed)
    shape = (about["batch"], about["length"])
    ids = torch.randint(1, VOCABULARY, shape, generator=generator).to(setting.device)
    kind = torch.device(setting.device).type
    half = torch.autocast(kind, torch.bfloat16, enabled=setting.dtype == "bfloat16")
    if about["mode"] == MODES[0]:
        model.eval()

        def infer() -> object:
            with torch.inference_mode(), half:
                return model(ids).last_hidden_state

        return infer
    # Gradients and moments are there from the first step on: what a step adds is activations.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train() -> None:
        with half:
            loss = model(ids).last_hidden_state.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return train


def _largest_batch(
    about: dict[str, Any], setting: Setting, row: Mapping[str, Any]
) -> dict[str, Any]:
    """How many sequences fit into 95 % of the memory, if each takes what those of the row took."""
    if not row["peak_bytes"]:
        return {}
    weights = sum(4 * p.numel() for p in encoder(about, setting.seed, "meta").parameters())
    resident = weights * (1 if about["mode"] == MODES[0] else 4)  # gradients and two moments
    room = 0.95 * _memory(setting) - resident
    largest = int(room / (row["peak_bytes"] / about["batch"]))
    return {"largest_batch": largest, "memory_bytes": _memory(setting), "weights_bytes": weights}


def _memory(setting: Setting) -> int:
    if setting.cuda:
        return torch.cuda.get_device_properties(setting.device).total_memory
    line = Path("/proc/meminfo").read_text().splitlines()[0]  # MemTotal, in kB
    return 1024 * int(line.split()[1])
