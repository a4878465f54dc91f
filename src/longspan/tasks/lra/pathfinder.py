"""Pathfinder-32: whether two discs lie at the ends of one dashed path, from pixels in a row."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from longspan.tasks.lra.generate import Part, generate
from longspan.tasks.lra.pictures import draw
from longspan.tasks.lra.splits import Splits, single

HARD = "curv_contour_length_14"
DASHES = 14
SIZES = {"train": 160_000, "validation": 20_000, "test": 20_000}


def find(data_dir: Path) -> Splits | None:
    """The released hard set, `pathfinder32/curv_contour_length_14`, here or under `lra_release`.

    Its pictures are shuffled and cut 80/10/10, always in the same way.
    """
    for folder in (data_dir / "pathfinder32", data_dir / "lra_release" / "pathfinder32"):
        if (folder / HARD / "metadata").is_dir():
            pictures = list(_read(folder / HARD))
            order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))
            cuts = [0, len(order) * 8 // 10, len(order) * 9 // 10, len(order)]
            parts = [order[a:b].tolist() for a, b in pairwise(cuts)]
            return single(
                {name: [pictures[i] for i in part] for name, part in zip(SIZES, parts, strict=True)}
            )
    return None


def _read(folder: Path) -> Iterator[tuple[bytes, int]]:
    """Pixels and label of every picture: a line of metadata is folder, file, number, label, …"""
    from PIL import Image

    for listing in sorted((folder / "metadata").iterdir(), key=lambda path: int(path.stem)):
        for line in listing.read_text().splitlines():
            words = line.split()
            content = (folder / words[0] / words[1]).read_bytes()
            if content:  # one released picture is an empty file
                yield Image.open(io.BytesIO(content)).convert("L").tobytes(), int(words[3])


def make(
    folder: Path, seed: int, sizes: dict[str, int] = SIZES, workers: int | None = None
) -> Splits:
    """Generate the set: 200,000 pictures of paths of 14 dashes."""
    return generate(folder, _pictures, sizes, seed=seed, title="Pathfinder", workers=workers)


def _pictures(rng: np.random.Generator, count: int) -> Part:
    pictures = draw(rng, count, DASHES)
    return [image.tobytes() for image in pictures.images], pictures.labels.tolist()
