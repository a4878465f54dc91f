"""longspan: attention over long sequences at linear cost.

>>> import torch, longspan
>>> q = k = v = torch.randn(1, 8, 1000, 64)          # (B, H, N, D)
>>> longspan.yoso(q, k, v, num_hashes=32).shape
torch.Size([1, 8, 1000, 64])
"""

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
