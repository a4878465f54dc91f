"""Linformer: learned projections of keys and values along the sequence (Wang et al. 2020)."""

from longspan.attention.linformer.api import LinformerAttention, linformer, why_not_fused
from longspan.attention.linformer.projection import SequenceProjection

__all__ = ["LinformerAttention", "SequenceProjection", "linformer", "why_not_fused"]
