"""README is true: its example runs as printed, its table is the table."""

import re
from pathlib import Path

from longspan import METHODS

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_example_runs_as_printed():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["y"].shape == (2, 8, 2000, 64)
    assert names["q"].grad.isfinite().all()
    x = names["torch"].randn(2, 30, 512)
    assert names["layer"](x).shape == x.shape


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
