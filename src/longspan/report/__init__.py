"""Rows in, one self-contained page out."""

from longspan.report.charts import EXACT
from longspan.report.crossover import Crossover, crossover, exact_seconds, times
from longspan.report.page import write_page
from longspan.report.reading import read as read_rows
from longspan.report.report import write_report
from longspan.report.section import milliseconds

__all__ = [
    "EXACT",
    "Crossover",
    "crossover",
    "exact_seconds",
    "milliseconds",
    "read_rows",
    "times",
    "write_page",
    "write_report",
]
