"""Nyström attention (Nyströmformer, Xiong et al. 2021)."""

from longspan.attention.nystrom.api import NystromAttention, nystrom, why_not_fused

__all__ = ["NystromAttention", "nystrom", "why_not_fused"]
