"""Image: the class of a CIFAR-10 picture, from its grey levels in a row."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longspan.tasks.lra.splits import Splits, single

BATCHES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
LUMINANCE = 0.2989, 0.5870, 0.1140
RECORD = 1 + 3 * 1024  # a label, then red, green and blue planes


def grey(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Luminance of (n, 3, 1024) as TensorFlow rounds it, which is what the arena takes.

    trunc(L/255 · 255.5) in float32; other libraries differ by one level in a quarter of the pixels.
    """
    red, green, blue = (planes[:, i].astype(np.float32) / np.float32(255) for i in range(3))
    weights = [np.float32(x) for x in LUMINANCE]
    level = red * weights[0] + green * weights[1] + blue * weights[2]
    return (level * np.float32(255.5)).astype(np.uint8)


def find(data_dir: Path) -> Splits | None:
    """CIFAR-10 as `cifar10/{train,test}.parquet` (img, label) or as the official binary version.

    A parquet's pictures are PNG, grey ones taken as they are, coloured ones turned grey.
    """
    if (data_dir / "cifar10" / "train.parquet").exists():
        return single(
            {split: _parquet(data_dir / "cifar10" / f"{split}.parquet") for split in BATCHES}
        )
    folder = data_dir / "cifar-10-batches-bin"
    if (folder / "data_batch_1.bin").exists():
        return single(
            {
                split: [pair for name in names for pair in _binary(folder / name)]
                for split, names in BATCHES.items()
            }
        )
    return None


def _parquet(path: Path) -> Iterator[tuple[bytes, int]]:
    from PIL import Image
    from pyarrow import parquet

    table = parquet.read_table(path, columns=["img", "label"])
    for content, label in zip(*(table[name].to_pylist() for name in ("img", "label")), strict=True):
        # Hugging Face's own files wrap the bytes.
        content = content["bytes"] if isinstance(content, dict) else content
        picture = Image.open(io.BytesIO(content))
        if picture.mode == "L":
            yield picture.tobytes(), label
        else:
            colours = np.asarray(picture.convert("RGB")).reshape(1, 1024, 3).transpose(0, 2, 1)
            yield grey(colours).tobytes(), label


def _binary(path: Path) -> Iterator[tuple[bytes, int]]:
    records = np.fromfile(path, np.uint8).reshape(-1, RECORD)
    pixels = grey(records[:, 1:].reshape(-1, 3, 1024))
    for row, label in zip(pixels, records[:, 0], strict=True):
        yield row.tobytes(), int(label)
