"""The metrics of GLUE, in plain numpy: of logits (R, classes) or (R, 1), and labels (R,)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def accuracy(predicted: Array, labels: Array) -> float:
    """The share of labels that were predicted."""
    return float(np.mean(predicted == labels))


def f1(predicted: Array, labels: Array) -> float:
    """2 tp / (2 tp + fp + fn) of class 1; 0 where it neither occurs nor is predicted."""
    hits = np.sum((predicted == 1) & (labels == 1))
    both = np.sum(predicted == 1) + np.sum(labels == 1)
    return float(2 * hits / both) if both else 0.0


def matthews(predicted: Array, labels: Array) -> float:
    """The correlation of predicted and true classes, any number of them; 0 where one never varies.

    (c s − Σ p t) / √((s² − Σ p²)(s² − Σ t²)) with c hits among s rows, and p and t rows predicted
    and true of each class.
    """
    classes = np.union1d(predicted, labels)
    p = np.array([np.sum(predicted == c) for c in classes], np.float64)
    t = np.array([np.sum(labels == c) for c in classes], np.float64)
    s, c = float(len(labels)), float(np.sum(predicted == labels))
    spread = (s * s - p @ p) * (s * s - t @ t)
    return float((c * s - p @ t) / np.sqrt(spread)) if spread else 0.0


def pearson(x: Array, y: Array) -> float:
    """The linear correlation; 0 where one never varies."""
    x, y = x.astype(np.float64) - np.mean(x), y.astype(np.float64) - np.mean(y)
    spread = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / spread) if spread else 0.0


def spearman(x: Array, y: Array) -> float:
    """The correlation of ranks; equal values share their mean rank."""
    return pearson(_ranks(x), _ranks(y))


def _ranks(x: Array) -> Array:
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + 1 + last) / 2)[inverse]


def score_classes(logits: Array, labels: Array) -> dict[str, float]:
    """Accuracy."""
    return {"accuracy": accuracy(logits.argmax(-1), labels)}


def score_f1(logits: Array, labels: Array) -> dict[str, float]:
    """F1 and accuracy (MRPC, QQP)."""
    return {"f1": f1(logits.argmax(-1), labels), **score_classes(logits, labels)}


def score_matthews(logits: Array, labels: Array) -> dict[str, float]:
    """Matthews correlation and accuracy (CoLA)."""
    return {"matthews": matthews(logits.argmax(-1), labels), **score_classes(logits, labels)}


def score_correlation(outputs: Array, labels: Array) -> dict[str, float]:
    """Pearson and Spearman correlation (STS-B)."""
    outputs = outputs.reshape(len(labels))
    return {"pearson": pearson(outputs, labels), "spearman": spearman(outputs, labels)}
