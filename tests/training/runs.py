"""Runs small enough for tests: tiny models on made-up texts."""

import io

import texts
from rich.console import Console

from longspan.tasks import find
from longspan.tasks.glue import GLUE
from longspan.training import recipes, settings
from longspan.training.run import Run, train

# At these sizes every method approximates: 32 tokens or more, fewer landmarks, hashes and so on.
OPTIONS = {
    "softmax": {},
    "yoso": {"num_hashes": 8, "hash_bits": 4},
    "yoso_expectation": {"hash_bits": 4},
    "nystrom": {"num_landmarks": 8},
    "linformer": {"projected_length": 8},
}


def write_data(folder):
    """A corpus, one task of GLUE and IMDB, and the tokenizer of the corpus for both."""
    texts.write_corpus(folder)
    texts.write_task(folder / "glue" / "rte", GLUE["rte"].columns)
    texts.write_task(folder / "imdb", ("text",))
    return folder


def make(task, method, data, output, *, seed=0, start=None, **changes):
    """A run of a recipe at tiny size, ten steps of eight rows."""
    recipe = recipes.find(task, method, model_size="tiny", length=32)
    own = OPTIONS[method]
    if start is not None:
        recipe, own = recipe.from_start(), {}
    data_dir = data / "corpus" if task.startswith("mlm") else data
    given = {"steps": 10, "batch": 8, "epochs": 0, "evaluate_every": 0, "save_every": 0,
             "learning_rate": 1e-3, "precision": "fp32", **own}  # fmt: skip
    if not task.startswith("mlm"):
        given["tokenizer"] = str(data / "corpus")
    recipe = settings.apply(recipe, find(task), method, {**given, **changes})
    return Run(find(task), method, recipe, data_dir, output, seed, start)


def silent(run, **options):
    """Train without a word."""
    return train(run, console=Console(file=io.StringIO()), **options)
