"""ListOps: values by hand, the statistics of trees, the released layout."""

import numpy as np
import pytest
import torch

from longspan.tasks.lra import listops, trees
from longspan.tasks.lra.splits import checksum
from longspan.tasks.lra.trees import CLOSE, MAX, MED, MIN, SM, SYMBOLS


def solve(codes):
    """The value of a tree, one symbol after another: what `trees` computes for many at once."""
    functions = {MIN: min, MAX: max, MED: lambda x: int(np.median(x)), SM: lambda x: sum(x) % 10}
    stack = [[]]
    for code in codes:
        if code < 10:
            stack[-1].append(code)
        elif code == CLOSE:
            operator, *arguments = stack.pop()
            stack[-1].append(functions[operator](arguments))
        else:
            stack.append([code])
    ((value,),) = stack
    return value


HAND = [
    ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
    ("[MIN 5 [SM 9 9 9 ] 8 ]", 5),
    ("[MED 1 2 ]", 1),  # 1.5 is cut to 1
    ("[MED 9 1 5 ]", 5),
    ("[MED 3 8 1 9 ]", 5),  # (3 + 8)/2
    ("[SM 7 8 9 ]", 4),
    ("[SM [MAX 0 0 ] [MED 4 4 4 ] ]", 4),
]


@pytest.mark.parametrize(("source", "value"), HAND, ids=[source for source, _ in HAND])
def test_values_by_hand(source, value):
    assert solve(listops.encode(source)) == value
    operator, *arguments = listops.encode(source)
    if CLOSE not in arguments[:-1]:  # flat: the vectorised function, too
        counts = np.bincount(arguments[:-1], minlength=10)[None]
        assert trees.value(np.array([operator]), counts)[0] == value


def test_parentheses_of_the_release_are_dropped():
    assert listops.encode("( ( ( [MAX 2 ) 9 ) ] )") == listops.encode("[MAX 2 9 ]")
    with pytest.raises(ValueError, match=r"source must be made of 0 1 .*, got '\[MEAN'"):
        listops.encode("[MEAN 2 9 ]")


@pytest.fixture(scope="module")
def grown():
    return trees.grow(np.random.default_rng(0), 4000)


def test_values_of_grown_trees(grown):
    assert all(solve(tree) == value for tree, value in zip(*[x[:200] for x in grown], strict=True))


def test_statistics(grown):
    """Of 4,000 trees: standard errors are 0.006 for a share of 17 %, 6 for the mean length."""
    sources, values = grown
    lengths = np.array([len(tree) for tree in sources])
    assert lengths.min() > 500
    assert lengths.max() < 2000
    # 20,000 trees of a plain recursive generator have 1,034 ± 3 and quartiles 701, 951, 1308.
    assert abs(lengths.mean() - 1034) < 4 * 6.5
    assert np.abs(np.quantile(lengths, [0.25, 0.5, 0.75]) - [701, 951, 1308]).max() < 50
    share = np.bincount(values, minlength=10) / len(values)
    assert np.abs(share[[0, 9]] - 0.17).max() < 4 * 0.006
    assert np.abs(share[1:9] - 0.082).max() < 0.025
    root = np.array([tree[0] for tree in sources])
    guess = sum(np.bincount(np.array(values)[root == op]).max() for op in (MIN, MAX, MED, SM))
    assert 0.34 < guess / len(values) < 0.385  # what reading the root alone gives
    deepest = max(np.cumsum([(c > 9) - 2 * (c == CLOSE) for c in tree]).max() for tree in sources)
    assert deepest == 9  # operators within operators: their digits are at depth 10


def test_generated_set_depends_on_the_seed_alone(tmp_path):
    sizes = {"train": 1500, "validation": 300, "test": 200}
    whole = listops.make(tmp_path / "a", 7, sizes, workers=1)
    assert {name: len(split) for name, split in whole.items()} == sizes
    # Interrupted: one part is there, another half-written.
    (tmp_path / "b").mkdir()
    listops.generate(tmp_path / "c", listops._trees, {"train": 1000}, seed=7, title="", workers=1)
    from longspan.tasks.lra import generate

    generate._part((tmp_path / "b" / "7-0000.npz", listops._trees, (7, 0), 1000))
    (tmp_path / "b" / "7-0001.partial").write_bytes(b"half")
    assert checksum(listops.make(tmp_path / "b", 7, sizes, workers=2)) == checksum(whole)
    assert checksum(listops.make(tmp_path / "d", 8, sizes, workers=1)) != checksum(whole)
    assert not list(tmp_path.iterdir())


def test_the_recorded_set_is_still_made(tmp_path):
    """The first of a hundred parts of the set that results are of."""
    found = checksum(listops.make(tmp_path / "parts", 0, {"train": 1000}, workers=1))
    assert found == "228912d4732df2bcefc3c464a4f1fc3126bed25dea1b7f29a35dd1cd216557a1"


def test_released_layout(tmp_path):
    assert listops.find(tmp_path) is None
    folder = tmp_path / "lra_release" / "listops-1000"
    folder.mkdir(parents=True)
    for name, value in (("train", 9), ("val", 4), ("test", 0)):
        (folder / f"basic_{name}.tsv").write_text(
            f"Source\tTarget\n( ( ( [MAX 2 ) {value} ) ] )\t{value}\n"
        )
    found = listops.find(tmp_path)
    assert {name: split.labels.tolist() for name, split in found.items()} == {
        "train": [9], "validation": [4], "test": [0]
    }  # fmt: skip
    split = found["validation"]
    assert [SYMBOLS[c] for c in split.document(int(split.rows[0]))] == ["[MAX", "2", "4", "]"]
    assert split.data.dtype == torch.uint8
