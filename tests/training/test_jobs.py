import dataclasses
import io
import json

import pytest
import runs
from rich.console import Console

from longspan import records
from longspan.tasks import find
from longspan.training import settings, study, sweep
from longspan.training.jobs import Job, collect, execute
from longspan.training.tables import study_table, sweep_table


def quiet():
    return Console(file=io.StringIO(), width=200)


@pytest.fixture
def jobs(data):
    first = runs.make("mlm", "nystrom", data, data)
    second = runs.make("glue/rte", "nystrom", data, data, start=data)
    return [
        Job("first", "mlm", "nystrom", first.recipe, data / "corpus", save_model=True),
        Job("second", "glue/rte", "nystrom", second.recipe, data, seed=1, needs="first"),
    ]


def test_jobs_run_in_the_order_of_their_needs_and_continue(jobs, tmp_path):
    console = quiet()
    # Less than it takes to make a model, so that the first step is the last.
    assert execute(jobs, tmp_path, time_limit=0.01, console=console) == ["first", "second"]
    assert "first: stopped at step 1 (time limit)" in console.file.getvalue()
    assert execute(list(reversed(jobs)), tmp_path, console=quiet()) == []
    assert collect(jobs, tmp_path, tmp_path / "rows.jsonl") == 2
    rows = records.read(tmp_path / "rows.jsonl")
    assert [(row["task"], row["seed"]) for row in rows] == [("mlm", 0), ("glue/rte", 1)]
    again = quiet()
    assert execute(jobs, tmp_path, console=again) == []
    assert again.file.getvalue() == ""  # nothing is run twice


def test_what_failed_is_told_and_what_needs_it_is_left(jobs, tmp_path):
    wrong = dataclasses.replace(jobs[0], data_dir=tmp_path / "nowhere")
    console = quiet()
    assert execute([wrong, jobs[1]], tmp_path, console=console) == ["first", "second"]
    assert "first: failed: FileNotFoundError: data_dir must hold" in console.file.getvalue()


def test_other_settings_in_the_same_folder_are_refused(jobs, tmp_path):
    execute(jobs[:1], tmp_path, console=quiet())
    changed = dataclasses.replace(jobs[0], recipe=jobs[0].recipe.changed(steps=11))
    with pytest.raises(ValueError, match=r"must be new where settings have changed, got .*first"):
        execute([changed], tmp_path, console=quiet())


def test_a_study_trains_equally(data, tmp_path):
    variants = [study.variant(text) for text in ("softmax", "yoso-8=yoso:num_hashes=8,hash_bits=4")]
    planned = study.plan(
        variants, data, model_size="tiny", length=32, long_length=64, steps=4, long_steps=2,
        batch=8, tasks=["glue/rte"], seeds=2,
    )  # fmt: skip
    assert [job.name for job in planned if "softmax" in job.name] == [
        "softmax-mlm-32", "softmax-mlm-64", "softmax-glue-rte-0", "softmax-glue-rte-1",
    ]  # fmt: skip
    one, two = ([dataclasses.replace(job.recipe, options={}) for job in planned if name in job.name]
                for name in ("softmax", "yoso"))  # fmt: skip
    assert one == two
    assert planned[1].recipe.options == {"num_hashes": 8, "hash_bits": 4}
    assert execute(planned, tmp_path, console=quiet()) == []
    collect(planned, tmp_path, tmp_path / "rows.jsonl")
    table = study_table(tmp_path / "rows.jsonl")
    assert "| yoso-8 | 64 | 64 |" in table
    assert "| method | rte 32: accuracy |" in table
    scores = [
        row["metrics"]["validation"]["accuracy"]
        for row in records.read(tmp_path / "rows.jsonl")
        if (row["task"], row["variant"]) == ("glue/rte", "yoso-8")
    ]
    assert f"{50 * sum(scores):.1f} ({100 * min(scores):.1f}–{100 * max(scores):.1f})" in table


def test_settings_of_a_study_change_its_pre_training_alone(data):
    planned = study.plan([study.variant("softmax")], data, given=["positions=rotary", "warmup=5"])
    first, second, *_ = (job.recipe for job in planned)
    assert (first.config["positions"], first.warmup) == ("rotary", 5)
    assert (second.config, second.warmup) == ({}, 0.1)


def test_the_five_of_the_study_are_methods_with_options_they_have(data):
    for job in study.plan([study.variant(text) for text in study.VARIANTS], data):
        known = settings.known(find(job.task), job.method)
        assert all(known[name] == "options" for name in job.recipe.options)


def test_a_sweep_is_every_combination(data, tmp_path):
    planned = sweep.plan(
        "mlm", ["linformer"], {"projected_length": [4, 8], "length": [32, 64]},
        {"steps": 2, "batch": 4, "save_every": 0, "evaluate_every": 0}, data_dir=data / "corpus",
        size="tiny", seeds=2,
    )  # fmt: skip
    assert len(planned) == 8
    assert {job.recipe.config["max_position_embeddings"] for job in planned} == {32, 64}
    chosen = planned[:4]
    assert execute(chosen, tmp_path, console=quiet()) == []
    collect(chosen, tmp_path, tmp_path / "rows.jsonl")
    lines = sweep_table(tmp_path / "rows.jsonl").splitlines()
    assert lines[0].startswith("| projected_length | length | loss | perplexity | accuracy |")
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| 4", "32"], ["| 4", "64"]]
    assert json.loads((tmp_path / chosen[0].name / "run.json").read_text())["method"] == "linformer"
