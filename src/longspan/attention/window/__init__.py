"""Sliding-window attention (Longformer, Beltagy et al. 2020): token i sees |i − j| ≤ window."""

from longspan.attention.window.api import WindowAttention, why_not_fused, window

__all__ = ["WindowAttention", "why_not_fused", "window"]
