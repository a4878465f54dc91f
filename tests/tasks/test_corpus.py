import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import texts
import torch

from longspan.tasks import corpus, find
from longspan.tasks import tokenizer as tokenizers
from longspan.tasks.documents import documents

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return texts.write_corpus(tmp_path_factory.mktemp("corpus"))


def copy(folder, to):
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_documents_come_back_as_they_were(prepared):
    words = tokenizers.load(prepared)
    for split, numbers in (("train", [i for i in range(60) if (i + 1) % 20]),
                           ("validation", [19, 39, 59])):  # fmt: skip
        part = corpus.read(prepared, split)
        assert len(part.starts) == len(numbers)
        ends = [*part.starts[1:], len(part.tokens)]
        for number, begin, end in zip(numbers, part.starts, ends, strict=True):
            ids = part.tokens[begin:end].tolist()
            assert ids[-1] == words.sep_token_id
            said = texts.document(number)
            assert words.decode(ids[:-1]).replace(" .", ".") == said
    counts = np.bincount(corpus.read(prepared, "train").tokens)
    shares = counts[counts > 0] / counts.sum()
    assert corpus.read(prepared, "train").entropy == pytest.approx(-(shares * np.log(shares)).sum())


def test_tokens_are_memory_mapped(prepared):
    assert isinstance(corpus.read(prepared, "train").tokens, np.memmap)
    assert corpus.read(prepared, "train").tokens.dtype == np.uint16


@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "index"])
def test_a_damaged_corpus_is_named_with_what_to_do(prepared, tmp_path, damage):
    folder = copy(prepared, tmp_path / "copy")
    path = folder / "train.bin"
    whole = path.read_bytes()
    if damage == "changed":
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    elif damage == "cut":
        path.write_bytes(whole[:-2])
    elif damage == "missing":
        path.unlink()
    else:
        path = folder / "corpus.json"
        path.write_text(path.read_text()[:-20])
    with pytest.raises((ValueError, FileNotFoundError), match=r"run longspan tokenize again") as it:
        corpus.read(folder, "train")
    assert str(path) in str(it.value)


def test_nothing_is_left_of_an_interrupted_preparation(tmp_path, monkeypatch):
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "train.txt").write_text(texts.document(0))
    (raw / "validation.txt").write_text(texts.document(1))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_checksum", interrupted)
        with pytest.raises(KeyboardInterrupt):
            corpus.prepare([raw], tmp_path / "made", vocab_size=80)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]
    corpus.prepare([raw], tmp_path / "made", vocab_size=80)
    assert corpus.splits(tmp_path / "made") == ["train", "validation"]


def test_splits_are_read_from_columns_and_names(tmp_path):
    rows = {"text": ["a", "b", "c"], "split": ["train", "dev", "test"]}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    (tmp_path / "valid").mkdir()
    (tmp_path / "valid" / "x.txt").write_text("d")
    (tmp_path / "train-00001-of-00002.txt").write_text("e")
    assert sorted(documents([tmp_path])) == [
        ("test", "c"), ("train", "a"), ("train", "e"), ("validation", "b"), ("validation", "d")
    ]  # fmt: skip


def test_files_given_one_by_one_are_held_out_as_those_of_a_folder(tmp_path):
    files = [tmp_path / f"{number:02}.txt" for number in range(40)]
    for path in files:
        path.write_text(path.stem)
    assert list(documents(files)) == list(documents([tmp_path]))
    assert [text for split, text in documents(files) if split == "validation"] == ["19", "39"]


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data_dir must hold \.parquet or \.txt"):
        list(documents([tmp_path / "nowhere"]))
    damaged = tmp_path / "damaged.parquet"
    damaged.write_bytes(b"PAR1 and no more")
    with pytest.raises(ValueError, match=r"damaged\.parquet: .*; fetch or write it again"):
        list(documents([damaged]))
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(ValueError, match=r"column must be one of body in .*, got 'text'"):
        list(documents([tmp_path / "other.parquet"]))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("Café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"text files must be UTF-8, got .*latin\.txt"):
        list(documents([latin]))


def test_a_corpus_without_held_out_documents_is_refused(tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "one.txt").write_text(texts.document(0))
    with pytest.raises(ValueError, match=r"others to hold out \(20 or more, .*\), got train"):
        corpus.prepare([tmp_path / "raw"], tmp_path / "made", vocab_size=80)
    assert not (tmp_path / "made").exists()


def test_text_is_tokenized_once_and_again_when_it_changes(tmp_path):
    pq.write_table(
        pa.table({"text": [texts.document(i) for i in range(20)]}), tmp_path / "a.parquet"
    )
    options = {"tokenizer": None, "vocab_size": 80, "column": "text"}
    first = corpus.prepared(tmp_path, **options)
    assert corpus.prepared(tmp_path, **options) == first
    assert corpus.prepared(tmp_path, **{**options, "vocab_size": 81}) != first
    pq.write_table(
        pa.table({"text": [texts.document(i) for i in range(21)]}), tmp_path / "a.parquet"
    )
    assert corpus.prepared(tmp_path, **options) != first


def test_runs_that_begin_at_once_tokenize_once(tmp_path):
    pq.write_table(
        pa.table({"text": [texts.document(i) for i in range(20)]}), tmp_path / "a.parquet"
    )
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: corpus.prepared(tmp_path, vocab_size=80), range(2))
    assert first == second
    assert corpus.splits(first) == ["train", "validation"]


def test_datasets_of_hugging_face_are_streamed(tmp_path):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "hub"
    folder.mkdir()
    for split, numbers in (("train", range(5)), ("validation", range(5, 7))):
        rows = pa.table({"text": [texts.document(i) for i in numbers]})
        pq.write_table(rows, folder / f"{split}-00000-of-00001.parquet")
    datasets.disable_progress_bars()
    found = list(documents([f"hf:{folder}"]))
    assert [split for split, _ in found] == ["train"] * 5 + ["validation"] * 2
    assert found[6][1] == texts.document(6)
    with pytest.raises(FileNotFoundError, match=r"data_dir must name a dataset within reach"):
        list(documents([f"hf:{tmp_path / 'nowhere'}"]))


def test_rows_hold_every_token_once_an_epoch(prepared):
    data = find("mlm").load(prepared, length=64, device=CPU)
    batch = data.train.batch(range(len(data.train)), epoch=0)
    ids, places, labels = (batch[n] for n in ("input_ids", "masked_positions", "labels"))
    ids = ids.scatter(1, places, torch.where(labels == -100, ids.gather(1, places), labels))
    assert (ids[:, 0] == data.tokenizer.cls_token_id).all()
    ids = ids[:, 1:].flatten()
    ids = ids[ids != data.tokenizer.pad_token_id].numpy()
    assert (ids == corpus.read(prepared, "train").tokens).all()
    assert (batch["attention_mask"].sum(1) < 64).sum() <= 1


def test_segments_are_swapped_half_of_the_time(prepared):
    data = find("mlm-sop").load(prepared, length=64, device=CPU, mask_share=0.01)
    rows = len(data.train)
    labels, seen = [], []
    for epoch in range(4):
        batch = data.train.batch(range(rows), epoch)
        labels.append(batch["sentence_order_label"])
        seen.append((batch["token_type_ids"] * batch["attention_mask"]).sum(1)
                    if "attention_mask" in batch else batch["token_type_ids"].sum(1))  # fmt: skip
    swapped = torch.cat(labels).float().mean().item()
    assert swapped == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(4 * rows))
    assert torch.cat(seen).min() >= 2  # every row has a second segment
    batch = data.train.batch([3], epoch=0)
    ids, types = batch["input_ids"][0].tolist(), batch["token_type_ids"][0].tolist()
    sep = data.tokenizer.sep_token_id
    assert ids[0] == data.tokenizer.cls_token_id
    assert ids[types.index(1) - 1] == sep
    assert ids[-1] == sep


def test_held_out_documents_are_read_at_every_length(prepared):
    data = find("mlm").load(prepared, length=2048, device=CPU, evaluation_rows=1)
    assert list(data.evaluation) == ["validation-2048", "validation-512", "validation-1024"]
    first = next(iter(data.evaluation.values()))
    one, two = first.batch([0], epoch=0), first.batch([0], epoch=0)
    assert all((one[name] == two[name]).all() for name in one)


def test_a_tokenizer_is_given_by_file_or_vocabulary(prepared, tmp_path):
    trained = tokenizers.load(prepared)
    assert tokenizers.load(prepared / "tokenizer.json").get_vocab() == trained.get_vocab()
    vocabulary = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    (tmp_path / "vocab.txt").write_text("\n".join(word for word, _ in vocabulary))
    read = tokenizers.load(tmp_path)
    assert tokenizers.fingerprint(read) == tokenizers.fingerprint(trained)
    said = texts.document(3)
    assert read.encode(said) == trained.encode(said)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer must be readable, got .*tokenizer\.json"):
        tokenizers.load(tmp_path / "tokenizer.json")
    with pytest.raises(FileNotFoundError, match=r"tokenizer must be a file, a folder or a name"):
        tokenizers.load(tmp_path / "nowhere")


def test_the_index_says_what_is_inside(prepared):
    index = json.loads((prepared / "corpus.json").read_text())
    assert index["splits"]["train"]["documents"] == 57
    assert set(index["splits"]["train"]) == {"tokens", "documents", "entropy", "sha256"}
