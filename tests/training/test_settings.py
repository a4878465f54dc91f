import pytest

from longspan.tasks import TASKS, find
from longspan.training import recipes, settings
from longspan.training.recipes import FAMILIES, SIZES, Recipe


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("method", ["softmax", "yoso", "nystrom", "linformer", "window"])
def test_every_task_has_a_recipe_for_every_method(task, method):
    recipe = recipes.find(task, method)
    assert set(recipe.options) <= set(settings.known(find(task), method))
    assert recipes.find(task, method, model_size="base").config["hidden_size"] == 768


def test_pre_training_follows_the_papers():
    short, long = (recipes.find("mlm", "yoso", length=n) for n in (512, 4096))
    assert (short.batch, short.learning_rate, short.steps) == (256, 1e-4, 1_000_000)
    assert (long.batch, long.learning_rate, long.steps) == (64, 5e-5, 75_000)
    assert short.options == {"num_hashes": 32, "hash_bits": 9}
    assert short.config["num_hidden_layers"] == SIZES["small"]["num_hidden_layers"] == 4


def test_a_setting_goes_where_it_belongs():
    given = settings.parse([
        "steps=7", "learning_rate=2e-4", "num_hashes=5", "norm=pre", "whole_word=true",
        "tokenizer=a/b",
    ])  # fmt: skip
    recipe = settings.apply(recipes.find("mlm", "yoso"), find("mlm"), "yoso", given)
    assert (recipe.steps, recipe.learning_rate) == (7, 2e-4)
    assert recipe.options == {"num_hashes": 5, "hash_bits": 9}
    assert recipe.config["norm"] == "pre"
    assert recipe.data == {"whole_word": True, "tokenizer": "a/b"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("num_hahses=3", r"got 'num_hahses' \(did you mean 'num_hashes'\?\)"),
        ("num_landmarks=3", r"--set must name one of .*, got 'num_landmarks'"),
        ("steps", r"--set must be name=value, got 'steps'"),
        ("steps=-1", r"steps must be an integer of at least 0, got -1"),
        ("batch=2.5", r"batch must be an integer of at least 1, got 2\.5"),
        (
            "schedule=square",
            r"schedule must be one of 'linear', 'constant', 'cosine', 'inverse_sqrt', 'one_cycle', "
            r"got 'square'",
        ),
        ("steps=0", r"epochs must be above 0 where steps is 0"),
    ],
)
def test_a_wrong_setting_says_what_is_right(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        settings.apply(recipes.find("mlm", "yoso"), find("mlm"), "yoso", settings.parse([given]))


def test_unknown_names_are_told_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'glue/mrpc'"):
        find("glue/mprc")
    with pytest.raises(ValueError, match="size must be one of 'tiny', 'small', 'base', got 'huge'"):
        recipes.find("mlm", "yoso", model_size="huge")


def test_settings_that_a_recipe_has_anyway_tell_nothing():
    """Rows of runs that are the same then have the same settings, and are of one group."""
    task, method = find("lra/text"), "nystrom"
    recipe = recipes.find(task.name, method)
    own = ["evaluate_every=500", "learning_rate=1e-4", "num_landmarks=128", "classifier_act=relu",
           "protocol=longspan", "graph=false"]  # fmt: skip
    other = ["steps=0", "epochs=3", "learning_rate=2e-4", "num_landmarks=64", "classifier_size=64",
             "protocol=wisconsin", "data_seed=0"]  # fmt: skip
    assert settings.telling(recipe, task, method, own) == []
    assert settings.telling(recipe, task, method, [*own, *other]) == other


def test_families_name_all_tasks():
    assert {task.partition("/")[0] for task in TASKS} == set(FAMILIES)


def test_a_recipe_for_a_start_leaves_the_model_alone():
    recipe = Recipe(8, 1, 1e-3, steps=1, config={"norm": "pre"}, options={"num_hashes": 3})
    assert recipe.from_start().config == recipe.from_start().options == {}
