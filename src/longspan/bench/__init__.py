"""Timing of attention methods: cases in, plain rows out."""

from longspan.bench.cases import MODES, Case
from longspan.bench.measure import (
    Timing,
    affordable,
    measure,
    peak_bytes,
    predict,
    timing_row,
)

__all__ = [
    "MODES",
    "Case",
    "Timing",
    "affordable",
    "measure",
    "peak_bytes",
    "predict",
    "timing_row",
]
