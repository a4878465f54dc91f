"""The sets of the arena: found, or generated, then kept as one file; and arranged by protocol."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock

from longspan.attention import checks
from longspan.tasks.lra import image, listops, pathfinder, retrieval, text
from longspan.tasks.lra.splits import Split, Splits, checksum, load, save

PROTOCOLS = ("longspan", "wisconsin", "google")
HELD_OUT = 0.1  # of training, where a set has no validation of its own
LRA_RELEASE = "lra_release.gz of github.com/google-research/long-range-arena (8 GB)"


@dataclass(frozen=True)
class Set:
    """One set: where it is looked for, how it is made, what a model must know of it.

    Attributes:
        find: reads it from a folder in the layouts it is published in; None where there is none.
        classes: how many labels there are.
        symbols: how many values a byte of it takes.
        length: bytes of a document that are read.
        padded: tokens of a padded document, the next power of two.
        batch: examples of a step in published settings.
        get: how to get it, for the error where it is missing.
        make: generates it, given a folder for parts and a seed.
        checksum: of what `make` gives for seed 0.
        pixels: documents are pictures, in which 0 is black.
        test_as_validation: published results chose checkpoints by the test set.
    """

    find: Callable[[Path], Splits | None]
    classes: int
    symbols: int
    length: int
    padded: int
    batch: int
    get: str
    make: Callable[[Path, int], Splits] | None = None
    checksum: str | None = None
    pixels: bool = False
    test_as_validation: bool = False


SETS = {
    "listops": Set(
        listops.find,
        classes=10,
        symbols=15,
        length=2000,
        padded=2048,
        batch=32,
        get=f"it is generated, or read from listops-1000 of {LRA_RELEASE}",
        make=listops.make,
        checksum="d7776d82aae6b7fd302c167d4038d85a964a065517d05fa63bea480982019270",
    ),
    "text": Set(
        text.find,
        classes=2,
        symbols=256,
        length=4000,
        padded=4096,
        batch=32,
        get="unpack aclImdb_v1.tar.gz of ai.stanford.edu/~amaas/data/sentiment there, or save "
        "Hugging Face's stanfordnlp/imdb as imdb/train.parquet and imdb/test.parquet",
        test_as_validation=True,
    ),
    "retrieval": Set(
        retrieval.find,
        classes=2,
        symbols=256,
        length=4000,
        padded=4096,
        batch=32,
        get=f"unpack tsv_data/new_aan_pairs.*.tsv of {LRA_RELEASE} there",
    ),
    "retrieval-wiki": Set(
        retrieval.find_wiki,
        classes=2,
        symbols=256,
        length=4000,
        padded=4096,
        batch=32,
        get="make wiki_schools/articles.parquet (text) and pairs_{train,validation,test}.parquet "
        "(doc1, doc2, label) of articles and of links between them",
    ),
    "image": Set(
        image.find,
        classes=10,
        symbols=256,
        length=1024,
        padded=1024,
        batch=256,
        get="unpack cifar-10-binary.tar.gz of www.cs.toronto.edu/~kriz/cifar.html there, or save "
        "Hugging Face's uoft-cs/cifar10 as cifar10/train.parquet and cifar10/test.parquet",
        pixels=True,
    ),
    "pathfinder": Set(
        pathfinder.find,
        classes=2,
        symbols=256,
        length=1024,
        padded=1024,
        batch=256,
        get=f"it is generated, or read from pathfinder32 of {LRA_RELEASE}",
        make=pathfinder.make,
        checksum="9bac6324553dcc85fea2aa02e5bedc3f7e61de64029c5da44821078c37a64806",
        pixels=True,
    ),
}


def prepare(name: str, data_dir: Path, seed: int = 0) -> Splits:
    """The splits a set is published in, kept as `lra-{name}.npz` in `data_dir` from the first time.

    Raises `FileNotFoundError`, with how to get the set, where it is neither there nor generated.
    """
    checks.choice("set", name, SETS)
    data_dir, row = Path(data_dir), SETS[name]
    kept = data_dir / f"lra-{name}.npz"
    if kept.exists():
        return load(kept)
    splits = row.find(data_dir)
    if splits is None and row.make is None:
        raise FileNotFoundError(f"data_dir must hold the {name} set, got {data_dir}: {row.get}")
    data_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(data_dir / f"lra-{name}.lock"):  # several runs may begin at once
        if kept.exists():
            return load(kept)
        if splits is None:
            assert row.make is not None
            splits = row.make(data_dir / f"lra-{name}.parts", seed)
            made = checksum(splits)
            if seed == 0 and row.checksum is not None and made != row.checksum:
                warnings.warn(
                    f"the generated {name} set is not the one of recorded results (its SHA-256 is "
                    f"{made}, not {row.checksum}): another numpy or Pillow may draw differently",
                    stacklevel=2,
                )
        save(kept, splits)
    return splits


def arrange(name: str, splits: Splits, protocol: str) -> Splits:
    """The train, validation and test that a protocol takes of a set.

    Where validation is missing, a tenth of training is held out, always the same. Published
    protocols take the test set for it, if that is what was published, and score whole batches only.
    """
    checks.choice("protocol", protocol, PROTOCOLS)
    published = protocol != "longspan"
    if "validation" not in splits and published and SETS[name].test_as_validation:
        splits = {**splits, "validation": splits["test"]}
    if "validation" not in splits:
        train: Split = splits["train"]
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
        held = int(len(train) * HELD_OUT)
        apart = {"train": train.pick(order[held:]), "validation": train.pick(order[:held])}
        splits = {**splits, **apart}
    if published:
        batch = SETS[name].batch
        for split in ("validation", "test"):
            found = splits[split]
            splits = {**splits, split: found.pick(slice(len(found) // batch * batch or None))}
    return splits
