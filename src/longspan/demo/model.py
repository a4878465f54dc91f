"""The demo's model: torch's own encoder layer with its attention swapped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import longspan
from longspan.demo.task import NUM_TOPICS, NUM_WORDS


class Reader(nn.Module):
    """Reads a padded batch of documents and answers its questions, the first tokens.

    Everything but the attention is `torch.nn.TransformerEncoderLayer`, pre-norm, so that two
    readers differ in `method` alone.
    """

    def __init__(
        self,
        method: str,
        *,
        length: int,
        width: int = 64,
        num_heads: int = 2,
        num_layers: int = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        self.topic = nn.Embedding(NUM_TOPICS, width)
        self.word = nn.Embedding(NUM_WORDS + 1, width)  # one more: the question
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, num_heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.answer = nn.Linear(width, NUM_WORDS)
        # Last, so that all readers drawn from one seed share every weight drawn before.
        for layer in self.layers:
            layer.self_attn = longspan.MultiheadAttention(
                width, num_heads, method=method, batch_first=True, **options
            )

    def forward(self, topics: Tensor, words: Tensor, padding: Tensor) -> Tensor:
        """Logits (B, NUM_TOPICS, NUM_WORDS), one answer per question, for documents (B, N)."""
        x = self.topic(topics) + self.word(words) + self.position[: topics.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.answer(self.norm(x[:, :NUM_TOPICS]))
