"""Numbers of the papers, as printed there."""

from __future__ import annotations

# Nyströmformer (arXiv 2102.03902), table 1: MB / ms of self-attention on a GTX 1080 Ti, where exact
# attention is not fused. "softmax" of the paper is `eager` here.
NYSTROM_COLUMNS = (
    "eager", "softmax", "linformer-256", "window-257", "nystrom-64", "nystrom-32",
)  # fmt: skip
NYSTROM = {
    512: ("54 / 0.8", "", "41 / 0.7", "32.2 / 2.4", "35 / 0.7", "26 / 0.6"),
    1024: ("186 / 2.4", "", "81 / 1.3", "65 / 4.6", "63 / 1.3", "49 / 1.2"),
    2048: ("685 / 10.0", "", "165 / 2.7", "130 / 9.2", "118 / 2.7", "96 / 2.6"),
    4096: ("2620 / 32.9", "", "366 / 5.3", "263 / 18.5", "229 / 5.9", "193 / 5.6"),
    8192: ("10233 / 155.4", "", "635 / 11.3", "455 / 36.2", "450 / 12.3", "383 / 11.5"),
}

# Linformer (arXiv 2006.04768), table 3: times as fast / as little memory as exact attention, a
# whole model's inference on a 16 GB V100, by length and projected length.
LINFORMER: dict[int, dict[int, tuple[float, float]]] = {
    512: {128: (1.5, 1.7), 256: (1.3, 1.5)},
    1024: {128: (1.7, 3.0), 256: (1.6, 2.9), 512: (1.3, 1.8)},
    2048: {128: (2.6, 6.1), 256: (2.4, 5.6), 512: (2.1, 3.6), 1024: (1.3, 2.0)},
    4096: {128: (3.4, 14), 256: (3.2, 13), 512: (2.8, 8.3), 1024: (2.2, 4.3), 2048: (1.3, 2.3)},
    8192: {128: (5.5, 28), 256: (5.0, 26), 512: (4.4, 17), 1024: (3.5, 8.5), 2048: (2.1, 4.5)},
    16384: {128: (8.6, 56), 256: (7.8, 48), 512: (7.0, 32), 1024: (5.6, 16), 2048: (3.3, 8)},
    32768: {128: (13, 56), 256: (12, 48), 512: (11, 36), 1024: (8.8, 18), 2048: (5.0, 16)},
    65536: {128: (20, 60), 256: (18, 52), 512: (16, 40), 1024: (14, 20), 2048: (7.9, 18)},
}

# GLUE and IMDB, development sets: Nyströmformer's and Linformer's tables. F1 for MRPC and QQP in
# the former, accuracy elsewhere.
GLUE = {
    ("softmax", "Nyströmformer paper, BERT-base"): {
        "sst2": 90.0, "mrpc": 88.4, "qnli": 90.3, "qqp": 87.3, "mnli": 82.4, "imdb": 93.3,
    },
    ("nystrom", "Nyströmformer paper, base"): {
        "sst2": 91.4, "mrpc": 88.1, "qnli": 88.7, "qqp": 86.3, "mnli": 80.9, "imdb": 93.2,
    },
    ("softmax", "Linformer paper, RoBERTa-base"): {
        "sst2": 93.1, "imdb": 94.1, "qnli": 90.9, "qqp": 90.9,
    },
    ("linformer", "Linformer paper, k = 256"): {
        "sst2": 93.2, "imdb": 94.0, "qnli": 90.6, "qqp": 90.5,
    },
}  # fmt: skip
