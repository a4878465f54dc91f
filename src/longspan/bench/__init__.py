"""Timing of attention methods: cases in, plain rows out."""

from longspan.bench.cases import MODES, Case
from longspan.bench.measure import Timing, measure, timing_row

__all__ = ["MODES", "Case", "Timing", "measure", "timing_row"]
