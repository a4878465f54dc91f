"""Queries, keys and values of a real encoder reading a real text. Needs transformers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.bench.suite import Setting

Layers = list[tuple[Tensor, Tensor, Tensor]]  # q, k, v of each, (B, H, N, D)
WINDOWS = 16
MOST_TOKENS = 512
_RECORD = "longspan-record"


def layers(setting: Setting, weights: str = "trained") -> Layers:
    """The queries, keys and values of the model and text that a setting names."""
    assert setting.model is not None
    seed = setting.seed if weights == "random" else None
    return _layers(setting.model, setting.text, setting.device, seed)


@functools.lru_cache(maxsize=2)
def _layers(model: str, text: str | None, device: str, random_seed: int | None) -> Layers:
    """What every attention layer of `model` gets when it reads WINDOWS stretches of a text.

    A stretch is as long as the model's positions allow, up to MOST_TOKENS, and has no padding. The
    text is that of a file, or longspan's own source. With `random_seed` the weights are not those
    of the model but drawn anew: the control.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    found: Layers = []

    def record(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **_: Any
    ) -> tuple[Tensor, None]:
        found.append((q.detach(), k.detach(), v.detach()))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2), None

    AttentionInterface.register(_RECORD, record)
    if random_seed is None:
        encoder = AutoModel.from_pretrained(model, attn_implementation=_RECORD)
    else:
        torch.manual_seed(random_seed)
        config = AutoConfig.from_pretrained(model, attn_implementation=_RECORD)
        encoder = AutoModel.from_config(config)
    ids = _windows(model, text, min(MOST_TOKENS, encoder.config.max_position_embeddings))
    with torch.inference_mode():
        encoder.eval().float().to(device)(ids.to(device))
    if not found:
        raise ValueError(f"model must call transformers' attention interface, got {model}")
    return found


def _windows(model: str, text: str | None, tokens: int) -> Tensor:
    """(B, N) token ids, spread evenly over the text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(read(text), return_tensors="pt", verbose=False)["input_ids"][0]
    count = min(WINDOWS, len(ids) // tokens)
    if count == 0:
        raise ValueError(f"text must have at least {tokens} tokens, got {len(ids)}")
    starts = torch.linspace(0, len(ids) - tokens, count).long()
    return torch.stack([ids[start : start + tokens] for start in starts])


def read(text: str | None) -> str:
    """The first 400,000 characters of a file, or of the package's own source."""
    if text is not None:
        return Path(text).read_text(encoding="utf-8", errors="replace")[:400_000]
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in sources)[:400_000]


def names(model: str, text: str | None) -> dict[str, str]:
    """Model and text as rows name them: without the folders of this machine."""
    name = model if not Path(model).exists() else "/".join(Path(model).resolve().parts[-2:])
    return {"model": name, "text": "longspan's source" if text is None else Path(text).name}
