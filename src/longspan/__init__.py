"""longspan: attention over long sequences at linear cost.

>>> import torch, longspan
>>> q = k = v = torch.randn(1, 8, 1000, 64)          # (B, H, N, D)
>>> longspan.yoso(q, k, v, num_hashes=32).shape
torch.Size([1, 8, 1000, 64])
"""

import importlib
from typing import TYPE_CHECKING, Any

from longspan.attention.linformer import LinformerAttention, SequenceProjection, linformer
from longspan.attention.methods import METHODS, Method, attention
from longspan.attention.multihead import MultiheadAttention
from longspan.attention.nystrom import NystromAttention, nystrom
from longspan.attention.reformer import ReformerAttention, reformer
from longspan.attention.softmax import SoftmaxAttention, softmax
from longspan.attention.strided import StridedAttention, strided
from longspan.attention.window import WindowAttention, window
from longspan.attention.yoso import (
    YosoAttention,
    YosoExpectationAttention,
    yoso,
    yoso_expectation,
)

if TYPE_CHECKING:
    from longspan import huggingface as huggingface
    from longspan import models as models
    from longspan.huggingface import convert as convert
    from longspan.huggingface import extend_positions as extend_positions

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "LinformerAttention",
    "Method",
    "MultiheadAttention",
    "NystromAttention",
    "ReformerAttention",
    "SequenceProjection",
    "SoftmaxAttention",
    "StridedAttention",
    "WindowAttention",
    "YosoAttention",
    "YosoExpectationAttention",
    "attention",
    "linformer",
    "nystrom",
    "reformer",
    "softmax",
    "strided",
    "window",
    "yoso",
    "yoso_expectation",
]

_MODULES = ("huggingface", "models")
_IN_HUGGINGFACE = ("convert", "extend_positions")


def __getattr__(name: str) -> Any:
    """What needs transformers is imported when it is first asked for."""
    if name not in _MODULES + _IN_HUGGINGFACE:
        raise AttributeError(f"module 'longspan' has no attribute {name!r}")
    try:
        if name in _MODULES:
            return importlib.import_module(f"longspan.{name}")
        return getattr(importlib.import_module("longspan.huggingface"), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            f"longspan.{name} needs transformers: pip install 'longspan[huggingface]'",
            name=error.name,
        ) from None
