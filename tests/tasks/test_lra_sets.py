"""The arena's sets: layouts, what is kept, both protocols, ids and masks."""

import dataclasses
import io
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from longspan.tasks.lra import image, retrieval, sets, text
from longspan.tasks.lra.batches import ByteExamples
from longspan.tasks.lra.splits import checksum, collect, load, save, single


def parquet(path, **columns):
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)


def png(pixels):
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def reviews(splits):
    return {
        name: [(x.document(int(r)), int(y)) for r, y in zip(x.rows, x.labels, strict=True)]
        for name, x in splits.items()
    }


REVIEWS = {"train": [("schön".encode(), 1), (b"bad", 0)], "test": [(b"so so", 0)]}


def test_text_layouts(tmp_path):
    assert text.find(tmp_path) is None
    for split, found in REVIEWS.items():
        for i, (document, label) in enumerate(found):
            folder = tmp_path / "a" / "aclImdb" / split / ("neg", "pos")[label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{i}_7.txt").write_bytes(document)
            (tmp_path / "a" / "aclImdb" / split / "pos").mkdir(exist_ok=True)
        parquet(
            tmp_path / "b" / "imdb" / f"{split}.parquet",
            text=[document.decode() for document, _ in found], label=[label for _, label in found],
        )  # fmt: skip
    assert reviews(text.find(tmp_path / "b")) == REVIEWS
    found = reviews(text.find(tmp_path / "a"))
    assert {name: sorted(x) for name, x in found.items()} == {
        name: sorted(x) for name, x in REVIEWS.items()
    }


def test_image_layouts_agree(tmp_path):
    assert image.find(tmp_path) is None
    rng = np.random.default_rng(0)
    planes, labels = rng.integers(0, 256, (6, 3, 1024), np.uint8), [3, 1, 4, 1, 5, 9]
    folder = tmp_path / "a" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    for i, name in enumerate([*image.BATCHES["train"], *image.BATCHES["test"]]):
        (folder / name).write_bytes(bytes([labels[i]]) + planes[i].tobytes())
    pictures = [x.transpose(1, 0).reshape(32, 32, 3) for x in planes]
    grey = [image.grey(x[None]).reshape(32, 32) for x in planes]
    for kind, images in (("b", pictures), ("c", grey)):
        for split, chosen in (("train", slice(0, 5)), ("test", slice(5, 6))):
            parquet(
                tmp_path / kind / "cifar10" / f"{split}.parquet",
                img=[png(x) for x in images[chosen]], label=labels[chosen],
            )  # fmt: skip
    found = [image.find(tmp_path / kind) for kind in "abc"]
    assert checksum(found[0]) == checksum(found[1]) == checksum(found[2])
    assert found[0]["train"].labels.tolist() == labels[:5]


def test_grey_is_tensorflows():
    # tf.image.rgb_to_grayscale of these colours, from its formula in exact arithmetic.
    colours = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [1, 2, 3]])
    assert image.grey(colours[:, :, None].astype(np.uint8))[:, 0].tolist() == [76, 149, 29, 255, 1]


def test_retrieval_layouts(tmp_path):
    assert retrieval.find(tmp_path) is None
    assert retrieval.find_wiki(tmp_path) is None
    (tmp_path / "tsv_data").mkdir()
    long = b"x" * 5000
    for name in ("train", "eval", "test"):
        (tmp_path / "tsv_data" / f"new_aan_pairs.{name}.tsv").write_bytes(
            b"1.0\t10\t11\tone\t" + long + b"\n0.0\t10\t12\tone\ttwo\n"
        )
    found = retrieval.find(tmp_path)
    split = found["validation"]
    assert split.rows.tolist() == [[0, 1], [0, 2]]  # each document is kept once
    assert split.labels.tolist() == [1, 0]
    assert [len(split.document(i)) for i in range(3)] == [3, 4000, 3]
    parquet(tmp_path / "wiki_schools" / "articles.parquet", text=["a", "bé", "c"])
    for name in ("train", "validation", "test"):
        path = tmp_path / "wiki_schools" / f"pairs_{name}.parquet"
        parquet(path, doc1=[2, 0], doc2=[1, 1], label=[1, 0])
    wiki = retrieval.find_wiki(tmp_path)
    assert wiki["test"].rows.tolist() == [[2, 1], [0, 1]]
    assert wiki["test"].document(1) == "bé".encode()


def test_a_set_is_kept_and_loaded(tmp_path):
    for split, found in REVIEWS.items():
        texts, labels = zip(*found, strict=True)
        parquet(tmp_path / "imdb" / f"{split}.parquet",
                text=[x.decode() for x in texts], label=labels)  # fmt: skip
    first = sets.prepare("text", tmp_path)
    (tmp_path / "imdb" / "train.parquet").unlink()
    again = sets.prepare("text", tmp_path)
    assert checksum(first) == checksum(again)
    assert reviews(again) == REVIEWS


@pytest.mark.parametrize("name", [name for name, row in sets.SETS.items() if row.make is None])
def test_a_missing_set_says_how_to_get_it(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=f"data_dir must hold the {name} set, got .*: "):
        sets.prepare(name, tmp_path)


def test_runs_that_begin_at_once_make_a_set_once(tmp_path, monkeypatch):
    made = []

    def make(folder, seed):
        made.append(folder)
        time.sleep(0.2)
        return single({"train": [(b"\1", 1)]})

    row = dataclasses.replace(sets.SETS["listops"], make=make, checksum=None)
    monkeypatch.setitem(sets.SETS, "listops", row)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(sets.prepare, ["listops"] * 3, [tmp_path / "data"] * 3))
    assert len(made) == 1
    assert len({checksum(splits) for splits in found}) == 1


def test_another_set_than_the_recorded_one_is_said(tmp_path, monkeypatch):
    row = dataclasses.replace(
        sets.SETS["listops"], make=lambda folder, seed: single({"train": [(b"\1", 1)]})
    )
    monkeypatch.setitem(sets.SETS, "listops", row)
    with pytest.warns(UserWarning, match="the generated listops set is not the one of recorded"):
        sets.prepare("listops", tmp_path)


def numbered(train, test):
    """Splits of one-byte documents, the byte the number of the document."""
    documents = [bytes([i % 256]) for i in range(train + test)]
    rows = [[i] for i in range(train + test)]
    labels = [i % 2 for i in range(train + test)]
    return collect(
        documents,
        {"train": (rows[:train], labels[:train]), "test": (rows[train:], labels[train:])},
    )


def test_validation_is_held_out_by_default():
    found = sets.arrange("text", numbered(200, 100), "longspan")
    chosen = {name: set(split.rows[:, 0].tolist()) for name, split in found.items()}
    assert {name: len(rows) for name, rows in chosen.items()} == {
        "train": 180, "validation": 20, "test": 100
    }  # fmt: skip
    assert chosen["train"] | chosen["validation"] == set(range(200))
    again = sets.arrange("text", numbered(200, 100), "longspan")
    assert torch.equal(found["validation"].rows, again["validation"].rows)


def test_published_protocols_validate_on_the_test_set():
    found = sets.arrange("text", numbered(200, 100), "wisconsin")
    assert len(found["train"]) == 200
    assert torch.equal(found["validation"].rows, found["test"].rows)
    # Images have no validation either, but published code held some out; batches are whole.
    found = sets.arrange("image", numbered(3000, 300), "wisconsin")
    assert {name: len(split) for name, split in found.items()} == {
        "train": 2700, "validation": 256, "test": 256
    }  # fmt: skip
    with pytest.raises(ValueError, match="protocol must be one of"):
        sets.arrange("text", numbered(2, 1), "madison")


def test_zero_is_padding_and_nothing_else():
    split = single({"train": [(b"\x00\xff\x05", 1), (b"\x00", 0), (b"abcdefgh", 1)]})["train"]
    examples = ByteExamples(split, length=5, padded=6)
    batch = examples.batch([2, 0, 1])
    assert batch["input_ids"].tolist() == [
        [98, 99, 100, 101, 102, 0], [1, 256, 6, 0, 0, 0], [1, 0, 0, 0, 0, 0]
    ]  # fmt: skip
    assert torch.equal(batch["attention_mask"], batch["input_ids"] != 0)
    assert batch["labels"].tolist() == [1, 1, 0]


def test_pixels_have_no_mask_unless_black_is_padding():
    split = single({"train": [(b"\x00\xff\x05\x00", 1), (b"\x01\x02\x03\x04", 0)]})["train"]
    batch = ByteExamples(split, length=4, padded=4).batch([0, 1])
    assert "attention_mask" not in batch
    assert batch["input_ids"].tolist() == [[1, 256, 6, 1], [2, 3, 4, 5]]
    batch = ByteExamples(split, length=4, padded=4, zero_is_padding=True).batch([0, 1])
    assert batch["input_ids"].tolist() == [[0, 255, 5, 0], [1, 2, 3, 4]]
    assert batch["attention_mask"].tolist() == [[False, True, True, False], [True] * 4]


def test_pairs_have_two_sequences(tmp_path):
    pairs = collect([b"a", b"bc", b"d"], {"train": ([[0, 1], [2, 0]], [1, 0])})
    save(tmp_path / "pairs.npz", pairs)
    batch = ByteExamples(load(tmp_path / "pairs.npz")["train"], length=2, padded=2).batch([1, 0])
    assert batch["input_ids"].tolist() == [[101, 0], [98, 0]]
    assert batch["pair_input_ids"].tolist() == [[98, 0], [99, 100]]
    assert batch["pair_attention_mask"].tolist() == [[True, False], [True, True]]


def test_batches_are_padded_no_further_than_they_need():
    documents = [(b"a" * n, 0) for n in (1, 3, 4, 5, 9, 16)]
    split = single({"train": documents})["train"]
    examples = ByteExamples(split, length=16, padded=16, paddings=4)
    shapes = [tuple(examples.batch([0, i])["input_ids"].shape) for i in range(6)]
    assert shapes == [(2, 4), (2, 4), (2, 4), (2, 8), (2, 12), (2, 16)]
    short, long = examples.batch([0, 1]), ByteExamples(split, length=16, padded=16).batch([0, 1])
    assert torch.equal(short["input_ids"], long["input_ids"][:, :4])
    assert torch.equal(short["attention_mask"], long["attention_mask"][:, :4])
    assert examples.tokens == pytest.approx(38 / 6)
