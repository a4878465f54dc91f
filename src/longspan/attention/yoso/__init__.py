"""YOSO: attention as Bernoulli sampling by locality-sensitive hashing (Zeng et al. 2021)."""

from longspan.attention.yoso.api import (
    YosoAttention,
    YosoExpectationAttention,
    why_expectation_not_fused,
    why_not_fused,
    yoso,
    yoso_expectation,
)

__all__ = [
    "YosoAttention",
    "YosoExpectationAttention",
    "why_expectation_not_fused",
    "why_not_fused",
    "yoso",
    "yoso_expectation",
]
