"""The arena through Trainer: every task learns, both protocols, what a recipe says, the matrix."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console

from longspan import records
from longspan.tasks import TASKS
from longspan.tasks.lra import trees
from longspan.tasks.lra.sets import SETS
from longspan.tasks.lra.splits import save, single
from longspan.training import arena, lra, recipes
from longspan.training.run import Run, train
from longspan.training.trainer import Shuffled

RNG = np.random.default_rng(0)


def listops(count):
    """Flat lists of five digits: their operator alone tells more than the commonest class."""
    digits = RNG.integers(0, 10, (count, 5))
    names = RNG.choice([trees.MIN, trees.MAX], count)
    counts = np.stack([np.bincount(row, minlength=10) for row in digits])
    values = trees.value(names, counts)
    return [
        (bytes([name, *row, trees.CLOSE]), int(value))
        for name, row, value in zip(names, digits, values, strict=True)
    ]


def text(count):
    words = (b"dull ", b"bright ")
    return [
        (b"".join(words[int(RNG.random() < 0.3 + 0.4 * y)] for _ in range(9)), y)
        for y in RNG.integers(0, 2, count).tolist()
    ]


def pictures(classes):
    """Noise around a grey level that is the class."""

    def make(count):
        labels = RNG.integers(0, classes, count)
        found = labels[:, None] * 20 + RNG.integers(0, 60, (count, 1024))
        return [
            (picture.astype(np.uint8).tobytes(), int(label))
            for picture, label in zip(found, labels, strict=True)
        ]

    return make


def pairs(count):
    """Documents about one of two things; pairs that are about the same belong together."""
    kinds = RNG.integers(0, 2, 2 * count)
    documents = [(b"ab", b"xy")[k] * 8 for k in kinds]
    rows = np.arange(2 * count).reshape(count, 2)
    return documents, rows, (kinds[0::2] == kinds[1::2]).astype(int)


def keep(folder, name):
    """A small set where `prepare` looks for what it kept."""
    sizes = {"train": 512, "validation": 64, "test": 256}
    if name.startswith("retrieval"):
        from longspan.tasks.lra.splits import collect

        documents, splits, first = [], {}, 0
        for split, size in sizes.items():
            more, rows, labels = pairs(size)
            splits[split] = (rows + first).tolist(), labels.tolist()
            documents, first = documents + more, first + len(more)
        save(folder / f"lra-{name}.npz", collect(documents, splits))
        return
    makers = {"listops": listops, "text": text, "image": pictures(10), "pathfinder": pictures(2)}
    splits = {split: makers[name](size) for split, size in sizes.items()}
    save(folder / f"lra-{name}.npz", single(splits))


TINY = [
    # task, method, protocol, tokens, steps; then what chance gives, and what must be reached
    ("listops", "yoso", "longspan", 16, 80, 0.25, 0.40),
    ("text", "nystrom", "longspan", 64, 80, 0.5, 0.75),
    ("retrieval", "linformer", "wisconsin", 16, 80, 0.5, 0.9),
    ("retrieval-wiki", "softmax", "longspan", 16, 80, 0.5, 0.9),
    ("image", "yoso", "wisconsin", 64, 80, 0.1, 0.5),
    ("pathfinder", "window", "longspan", 64, 40, 0.5, 0.9),
]


@pytest.mark.parametrize(
    ("name", "method", "protocol", "length", "steps", "chance", "goal"),
    TINY,
    ids=[f"{name}-{method}" for name, method, *_ in TINY],
)
def test_every_task_beats_chance(name, method, protocol, length, steps, chance, goal, tmp_path):
    keep(tmp_path, name)
    task = TASKS[f"lra/{name}"]
    recipe = recipes.find(task.name, method, length=length, protocol=protocol).changed(
        steps=steps, warmup=5, learning_rate=3e-3, evaluate_every=steps // 2, save_every=0,
        batch=32, config=dict(hidden_dropout_prob=0.0),
        options={"num_landmarks": 8} if method == "nystrom" else {},
    )  # fmt: skip
    said = io.StringIO()
    outcome = train(
        Run(task, method, recipe, tmp_path, tmp_path / "run"),
        console=Console(file=said, width=400),
    )
    for split in ("validation", "test"):  # of the weights that are scored, told apart
        best = outcome.row["best"]["step"]
        assert f"lra/{name} {method}: {split}, weights of step {best}  loss " in said.getvalue()
    accuracy = outcome.row["metrics"]["test"]["accuracy"]
    assert accuracy > goal > chance
    assert outcome.row["recipe"]["data"]["protocol"] == protocol
    assert [point["step"] for point in outcome.row["curve"]] == [steps // 2, steps]


@pytest.mark.parametrize("method", ["softmax", "yoso", "yoso_expectation", "nystrom", "linformer"])
@pytest.mark.parametrize("name", SETS)
def test_recipes_are_wisconsins(name, method):
    recipe = recipes.find(f"lra/{name}", method)
    assert (recipe.learning_rate, recipe.weight_decay, recipe.clip) == (1e-4, 0, 0)
    assert recipe.config["num_hidden_layers"] == 2
    assert recipe.config["hidden_size"] == 64
    assert recipe.config["num_attention_heads"] == 2
    assert recipe.config["intermediate_size"] == 128
    if method.startswith("yoso"):
        assert 2 ** recipe.options["hash_bits"] == recipe.length == SETS[name].padded
    published = recipes.find(f"lra/{name}", method, protocol="wisconsin")
    assert published.evaluate_every <= recipe.evaluate_every
    assert published.schedule == "one_cycle"
    classifier = {x: y for x, y in recipe.config.items() if x.startswith("classifier_")}
    assert list(classifier.values()) == [128, "relu", 0]
    assert published.config == {**recipe.config, "activation_dropout": 0.1}
    ours = dict(evaluate_every=recipe.evaluate_every, data=recipe.data, schedule="linear")
    assert published.changed(**ours) == recipe.changed(config=published.config)


def test_google_has_its_own_sizes():
    recipe = recipes.find("lra/listops", "softmax", protocol="google")
    assert recipe.config["hidden_size"] == 512
    assert recipe.schedule == "inverse_sqrt"
    assert recipe.learning_rate == pytest.approx(0.05 / 1000**0.5)
    with pytest.raises(ValueError, match="protocol must be one of 'longspan', 'wisconsin', 'goo"):
        recipes.find("lra/listops", "softmax", protocol="amherst")
    with pytest.raises(ValueError, match="protocol must be left out for mlm"):
        recipes.find("mlm", "softmax", protocol="google")


def test_protocols_read_the_same_pictures_differently(tmp_path):
    keep(tmp_path, "image")
    load = TASKS["lra/image"].load
    ours, theirs = (
        load(tmp_path, length=1024, device=torch.device("cpu"), protocol=protocol)
        for protocol in ("longspan", "wisconsin")
    )
    a, b = ours.train.batch([0, 1], 0), theirs.train.batch([0, 1], 0)
    assert torch.equal(a["input_ids"] - 1, b["input_ids"])
    assert "attention_mask" not in a
    assert torch.equal(b["attention_mask"], b["input_ids"] != 0)
    assert ours.config["pooling"] == "mean"
    assert theirs.config["pooling"] == "padded-mean"
    few = load(tmp_path, length=1024, device=torch.device("cpu"), evaluation_rows=7)
    assert [len(x) for x in few.evaluation.values()] == [7, 7]


def test_graph_is_refused_on_a_cpu(tmp_path):
    keep(tmp_path, "listops")
    recipe = recipes.find("lra/listops", "softmax", length=16).changed(steps=2, graph=True)
    run = Run(TASKS["lra/listops"], "softmax", recipe, tmp_path, tmp_path / "run")
    with pytest.raises(ValueError, match="graph must be false but for one process on an NVIDIA"):
        train(run, console=Console(quiet=True))


@pytest.mark.slow
def test_matrix_runs_continues_and_skips(tmp_path):
    keep(tmp_path, "listops")
    settings = ["length=16", "max_position_embeddings=16", "steps=4", "evaluate_every=2"]
    said = io.StringIO()

    def run(methods, **more):
        options = dict(seeds=1, protocol="longspan", data_dir=tmp_path, output=tmp_path / "runs",
                       rows=tmp_path / "rows.jsonl", jobs=1, time_limit=None)  # fmt: skip
        return arena.arena(
            ["lra/listops"], methods, settings, **{**options, **more},
            console=Console(file=said, width=400),
        )  # fmt: skip

    assert run(["softmax", "window"], time_limit=0.0) == 1
    assert "Left: lra-listops_softmax_longspan_" in said.getvalue()
    assert not (tmp_path / "rows.jsonl").exists()
    assert run(["softmax", "window"]) == 0
    rows = records.read(tmp_path / "rows.jsonl")
    assert [row["method"] for row in rows] == ["softmax", "window"]
    assert {(row["protocol"], row["settings"], row["steps"]) for row in rows} == {
        ("longspan", " ".join(settings), 4)
    }
    assert all(row["best"]["step"] in (2, 4) for row in rows)
    # What the rows hold is not run again, wherever its folder is.
    assert run(["softmax"], output=tmp_path / "elsewhere") == 0
    assert len(records.read(tmp_path / "rows.jsonl")) == 2
    assert not (tmp_path / "elsewhere").exists()
    assert f"Nothing is left to run: {tmp_path / 'rows.jsonl'} has every row." in said.getvalue()


def test_arena_says_what_it_cannot_run(tmp_path):
    options = dict(seeds=1, protocol="longspan", data_dir=tmp_path, output=tmp_path / "runs",
                   rows=None, jobs=1, time_limit=None)  # fmt: skip
    with pytest.raises(ValueError, match="task must be one of the arena, lra/…, got 'mlm'"):
        arena.arena(["mlm"], None, [], **options)
    with pytest.raises(ValueError, match="did you mean 'steps'"):
        arena.arena(["lra/listops"], ["softmax"], ["step=4"], **options)
    with pytest.raises(FileNotFoundError, match="data_dir must hold the text set"):
        arena.arena(["lra/text"], ["softmax"], [], **options)


def test_steps_are_those_the_report_calls_published():
    from longspan.report import published

    assert published.ARENA_STEPS == lra.STEPS
    for name, length in published.ARENA_LENGTHS.items():
        assert SETS[name].length == length


def test_batches_of_similar_lengths_are_a_random_order_of_all_rows():
    lengths = np.random.default_rng(0).integers(1, 1000, 4000)
    sampler = Shuffled(4000, 32, seed=3, lengths=lengths.tolist())
    order = np.array(list(sampler))
    assert sorted(order) == list(range(4000))
    batches = lengths[order].reshape(-1, 32)
    # Sorted runs of 1,600 rows: a batch spans about a fiftieth of all lengths.
    assert np.ptp(batches, axis=1).mean() < 60
    assert abs(np.corrcoef(np.arange(len(batches)), batches.mean(1))[0, 1]) < 0.3
    assert list(sampler) == order.tolist()
    sampler.set_epoch(1)
    assert (np.array(list(sampler)) - 4000 != order).any()
