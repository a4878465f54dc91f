import numpy as np
import pytest
import texts
import torch

from longspan.tasks import find, text
from longspan.tasks import tokenizer as tokenizers
from longspan.tasks.glue import GLUE

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    made = tokenizers.train((texts.document(i) for i in range(9)), 100)
    made.save_pretrained(str(folder))
    return folder


def test_every_task_of_glue_is_read(words, tmp_path):
    for name, kind in GLUE.items():
        folder = texts.write_task(tmp_path / "glue" / name, kind.columns, classes=kind.num_labels)
        if name == "mnli":
            for old, new in zip(("validation", "test"), kind.evaluation, strict=True):
                (folder / f"{old}.parquet").rename(folder / f"{new}.parquet")
        task = find(f"glue/{name}")
        data = task.load(tmp_path, length=64, device=CPU, tokenizer=str(words))
        assert list(data.evaluation) == list(kind.evaluation)
        batch = data.train.batch([0, 5, 3], epoch=0)
        assert batch["labels"].dtype == (torch.float32 if name == "stsb" else torch.int64)
        assert batch["token_type_ids"].any() == (len(kind.columns) == 2)
        assert batch["input_ids"].shape[1] % text.MULTIPLE == 0
        assert (batch["input_ids"][~batch["attention_mask"]] == 0).all()
        assert data.config["num_labels"] == kind.num_labels
        logits = np.random.default_rng(0).normal(size=(24, kind.num_labels))
        labels = next(iter(data.evaluation.values())).labels
        assert task.best in task.score(logits, labels)


def test_imdb_is_cut_to_the_length(words, tmp_path):
    texts.write_task(tmp_path / "imdb", ("text",))
    data = find("imdb").load(tmp_path, length=16, device=CPU, tokenizer=str(words))
    batch = data.train.batch(range(8), epoch=0)
    assert batch["input_ids"].shape == (8, 16)
    assert data.tokens == 16
    assert (batch["input_ids"][:, -1] == tokenizers.load(words).sep_token_id).all()


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [(3, 4, (3, 4)), (20, 4, (9, 4)), (4, 20, (4, 9)), (20, 20, (6, 7))],
)
def test_the_longer_part_is_cut(first, second, kept):
    row, begin = text.join([np.full(first, 7), np.full(second, 8)], 16, cls=2, sep=3)
    assert row.tolist() == [2] + [7] * kept[0] + [3] + [8] * kept[1] + [3]
    assert begin == kept[0] + 2


def test_tokens_are_kept_beside_the_data_and_are_enough(words, tmp_path):
    folder = texts.write_task(tmp_path / "rte", GLUE["rte"].columns)
    rte = find("glue/rte")
    before = rte.load(tmp_path, length=64, device=CPU, tokenizer=str(words)).train.batch([0, 1], 0)
    text._rows.cache_clear()
    for path in folder.glob("*.parquet"):
        path.unlink()
    after = rte.load(tmp_path, length=64, device=CPU, tokenizer=str(words)).train.batch([0, 1], 0)
    assert all((before[name] == after[name]).all() for name in before)
    text._rows.cache_clear()
    (kept,) = folder.rglob("train.npz")
    kept.write_bytes(kept.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"train\.npz is damaged: delete it"):
        rte.load(tmp_path, length=64, device=CPU, tokenizer=str(words))


def test_what_is_wrong_with_the_data_is_said(words, tmp_path):
    rte = find("glue/rte")
    with pytest.raises(FileNotFoundError, match=r"data_dir must hold glue/rte/train\.parquet"):
        rte.load(tmp_path, length=64, device=CPU, tokenizer=str(words))
    texts.write_task(tmp_path / "rte", ("sentence",))
    with pytest.raises(ValueError, match=r"must have the columns sentence1, sentence2, label, got"):
        rte.load(tmp_path, length=64, device=CPU, tokenizer=str(words))
    with pytest.raises(ValueError, match=r"tokenizer must be given where no trained model is"):
        rte.load(tmp_path, length=64, device=CPU)
    texts.write_task(tmp_path / "cola", ("sentence",), classes=3)
    with pytest.raises(ValueError, match=r"label must be from 0 to 1 in train of .*, got 0 to 2"):
        find("glue/cola").load(tmp_path, length=64, device=CPU, tokenizer=str(words))
