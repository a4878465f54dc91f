"""README is true: its example runs as printed, its table is the table."""

import re
from pathlib import Path

import torch
import transformers

from longspan import METHODS

README = (Path(__file__).parent.parent / "README.md").read_text()


TEN_LINES, THREE_WAYS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(example):
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    return names


def test_the_example_runs_as_printed():
    names = run(TEN_LINES)
    assert names["y"].shape == (2, 8, 2000, 64)
    assert names["q"].grad.isfinite().all()
    x = names["torch"].randn(2, 30, 512)
    assert names["layer"](x).shape == x.shape


def test_the_three_ways_in_run_as_printed(monkeypatch):
    """Of `from_pretrained` only the download is left out."""
    made = []

    def from_pretrained(name, attn_implementation):
        config = transformers.BertConfig(
            hidden_size=48, num_attention_heads=4, attn_implementation=attn_implementation
        )
        made.append(transformers.BertModel(config).eval())
        assert made[0].config._attn_implementation == "nystrom"
        assert made[0](ids).last_hidden_state.isfinite().all()
        return made[0]

    ids = torch.randint(0, 999, (1, 300))
    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", from_pretrained)
    names = run(THREE_WAYS)
    attention = made[0].encoder.layer[0].attention.self.longspan
    assert attention.options == {"num_landmarks": 128}
    assert made[0].config.max_position_embeddings == 4096
    assert names["model"](ids, labels=ids).loss.isfinite()


def test_the_table_is_methods():
    rows = re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*?) \| \[(.*?)\]\((.*?)\) \|$", README, re.MULTILINE
    )
    expected = [
        (name, m.cost, m.summary, m.paper, f"https://arxiv.org/abs/{m.paper}")
        for name, m in METHODS.items()
    ]
    assert rows == expected


def test_it_is_short():
    assert len(README.splitlines()) < 150
