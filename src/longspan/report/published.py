"""Numbers of the papers, as printed there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# The option a method is usually named by: yoso-32, nystrom-128.
NAMED_BY = {"yoso": "num_hashes", "nystrom": "num_landmarks", "linformer": "projected_length"}

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

# The Long Range Arena, accuracy in percent.
ARENA_TASKS = ("listops", "text", "retrieval", "image", "pathfinder")
ARENA_STEPS = {"listops": 5_000, "text": 20_000, "retrieval": 30_000, "image": 35_000,
               "pathfinder": 62_400}  # fmt: skip
ARENA_LENGTHS = {"listops": 2_000, "text": 4_000, "retrieval": 4_000, "image": 1_024,
                 "pathfinder": 1_024}  # fmt: skip


def parts(row: Mapping[str, Any]) -> tuple[float, float]:
    """How much of the published inputs and steps a run had, at most 1; 1 where nothing is known."""
    task = str(row["task"]).rpartition("/")[2].partition("-")[0]
    length, steps = (row.get("recipe") or {}).get("length"), row.get("steps")

    def part(had: float | None, published: float | None) -> float:
        return min(1.0, had / published) if had and published else 1.0

    return part(length, ARENA_LENGTHS.get(task)), part(steps, ARENA_STEPS.get(task))


def nearness(rows: Sequence[Mapping[str, Any]]) -> tuple[float, int, float, int, int]:
    """Which of several groups of runs of a task is shown, the highest: that with the longest inputs
    up to what is published, of these the one whose model is most the recipe's, then that with the
    most steps, the most seeds, and the fewest settings unlike the recipe's."""
    length, steps = parts(rows[0])
    recipe = rows[0].get("recipe") or {}
    of_training = {*recipe, *(recipe.get("data") or {})}
    names = [word.partition("=")[0] for word in choices(rows[0]).split()]
    of_model = [name for name in names if name not in of_training]
    return length, -len(of_model), steps, len(rows), -len(names)


def choices(row: Mapping[str, Any]) -> str:
    """The settings of a run, but for its steps and those that change its time alone; shorter
    inputs, too."""
    short = parts(row)[0] < 1
    left_out = ["graph", "compile", "steps", "save_every", *(["length"] if short else [])]
    words = str(row.get("settings") or "").split()
    words = [word for word in words if word.partition("=")[0] not in left_out]
    return " ".join([*words, *([f"length={row['recipe']['length']}"] if short else [])])


class Published(NamedTuple):
    """A row of a published table, in the order of ARENA_TASKS; `method` is ours it speaks of."""

    name: str
    method: str | None
    accuracy: tuple[float, ...]
    source: str


TAY = "Tay et al. 2021, Table 1"
XIONG = "Xiong et al. 2021, Table 3"
YOSO = "Zeng et al. 2021, as quoted by Chen et al. 2023"
ARENA = (
    Published("exact", "softmax", (37.10, 65.02, 79.35, 38.20, 74.16), XIONG),
    Published("YOSO-E", "yoso_expectation", (37.3, 64.7, 81.2, 39.8, 72.9), YOSO),
    Published("Nyströmformer", "nystrom", (37.15, 65.52, 79.56, 41.58, 70.94), XIONG),
    Published("Linformer", "linformer", (37.25, 55.91, 79.37, 37.84, 67.60), XIONG),
    Published("Reformer", "reformer", (19.05, 64.88, 78.64, 43.29, 69.36), XIONG),
    Published("Performer", None, (18.80, 63.81, 78.62, 37.07, 69.87), XIONG),
    Published("Transformer", None, (36.37, 64.27, 57.46, 42.44, 71.40), TAY),
    Published("Local attention", "window", (15.82, 52.98, 53.39, 41.46, 66.63), TAY),
    Published("Sparse Transformer", "strided", (17.07, 63.58, 59.59, 44.24, 71.71), TAY),
    Published("Longformer", None, (35.63, 62.85, 56.89, 42.22, 69.71), TAY),
    Published("Linformer", None, (35.70, 53.94, 52.27, 38.56, 76.34), TAY),
    Published("Reformer", None, (37.27, 56.10, 53.40, 38.07, 68.50), TAY),
    Published("BigBird", None, (36.05, 64.02, 59.29, 40.83, 74.87), TAY),
    Published("Performer", None, (18.01, 65.40, 53.82, 42.77, 77.05), TAY),
)
