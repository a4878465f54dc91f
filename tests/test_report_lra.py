"""The arena's table: seeds together, protocols apart, nothing called complete that is not."""

import pytest

from longspan import records
from longspan.report import lra
from longspan.report.published import ARENA_STEPS as STEPS


def row(task="listops", method="yoso", seed=0, accuracy=0.37, **more):
    options = {"yoso": {"num_hashes": 32}, "nystrom": {"num_landmarks": 128}}.get(method, {})
    steps = more.pop("steps", STEPS[task.partition("-")[0]])
    recipe = {"length": 4096, "data": {"protocol": more.pop("protocol", "longspan")}}
    return {
        "kind": "training", "task": f"lra/{task}", "method": method, "options": options,
        "seed": seed, "steps": steps, "seconds": 60.0, "side_by_side": 2,
        "metrics": {"validation": {"accuracy": accuracy}, "test": {"accuracy": accuracy}},
        "recipe": {**recipe, **more.pop("recipe", {})},
        "environment": {"gpu": "H200", "cpu": "EPYC"}, **more,
    }  # fmt: skip


def line(text, start):
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_seeds_are_one_cell_and_the_average_is_of_five():
    rows = [row(seed=s, accuracy=a) for s, a in enumerate((0.36, 0.37, 0.38))]
    rows += [row(task, accuracy=0.5) for task in lra.TASKS[1:]]
    text = lra.markdown(rows)
    cells = line(text, "**yoso-32**")
    assert cells[1:] == ["longspan", "37.00 ± 1.00 (3)", *["50.00 (1)"] * 4, "47.40"]
    assert line(text, "exact, Xiong")[2:] == ["37.1", "65.02", "79.35", "38.2", "74.16", "58.77"]


def test_protocols_methods_and_steps_are_kept_apart():
    text = lra.markdown([
        row(), row(protocol="wisconsin", accuracy=0.4), row(method="softmax", accuracy=0.39),
        row(steps=100, accuracy=0.2), row(method="nystrom", steps=100, accuracy=0.1),
        row(method="window", recipe={"length": 512, "data": {"protocol": "google"}}),
    ])  # fmt: skip
    assert line(text, "**yoso-32** | longspan")[2] == "37.00 (1)"
    assert line(text, "**yoso-32** | wisconsin")[2] == "40.00 (1)"
    assert line(text, "**nystrom-128**")[2] == "10.00 (1) †"
    assert line(text, "**window**")[1:3] == ["google", "37.00 (1) †"]
    assert line(text, "listops | softmax")[8] == "37.1 (+1.90)"
    assert line(text, "listops | yoso-32 | longspan |  | 100")[6] == "20.00 (1) †"


def test_more_steps_than_published_do_not_replace_more_seeds():
    rows = [row(seed=s, accuracy=a) for s, a in enumerate((0.36, 0.38))]
    text = lra.markdown([row(steps=2 * STEPS["listops"], accuracy=0.5), *rows])
    assert line(text, "**yoso-32**")[2] == "37.00 ± 1.41 (2)"
    assert line(text, "listops | yoso-32 | longspan |  | 10,000")[6] == "50.00 (1)"


def test_short_inputs_stand_for_none_that_are_as_long_as_published():
    short = {"length": 1024, "data": {"protocol": "longspan"}}
    rows = [row("text", seed=s, accuracy=0.6, recipe=short) for s in range(3)]
    assert line(lra.markdown(rows), "**yoso-32**")[3] == "60.00 ± 0.00 (3) †"
    text = lra.markdown([*rows, row("text", steps=17_000, accuracy=0.5)])
    assert line(text, "**yoso-32**")[3] == "50.00 (1) †"
    assert line(text, "text | yoso-32 | longspan | length=1024")[6] == "60.00 ± 0.00 (3) †"


def test_the_model_of_the_recipe_is_shown_before_longer_runs_of_another():
    recipe = dict(row()["recipe"], warmup=9)
    new = row("text", steps=7_000, accuracy=0.4, settings="warmup=9", recipe=recipe)
    old = row("text", steps=20_000, accuracy=0.3, settings="classifier_size=64", recipe=recipe)
    for rows in ((new, old), (old, new)):
        assert line(lra.markdown(rows), "**yoso-32**")[3] == "40.00 (1) †"


def test_of_equals_the_runs_nearest_to_the_recipe_are_shown():
    few, more = "learning_rate=5e-4", "learning_rate=5e-4 sharing=headwise"
    for order in ((few, more), (more, few)):
        rows = [row(settings=x, accuracy={few: 0.4, more: 0.3}[x]) for x in order]
        assert line(lra.markdown(rows), "**yoso-32**")[2] == "40.00 (1)"


def test_what_changes_the_time_alone_does_not_part_seeds():
    rows = [row(settings="graph=true"), row(seed=1, settings="graph=true compile=true")]
    (group,) = lra.groups(rows)
    assert len(group.rows) == 2
    assert len(lra.groups([*rows, row(seed=2, settings="steps=9 save_every=9")])) == 1
    assert len(lra.groups([*rows, row(settings="graph=true warmup=9")])) == 2
    _, short = lra.groups([*rows, row(recipe={"length": 512, "data": {"protocol": "longspan"}})])
    assert short.settings == "length=512"


def test_a_seed_counts_once_and_wiki_is_not_aan():
    text = lra.markdown([row(accuracy=0.1), row(), row("retrieval-wiki", accuracy=0.7)])
    assert line(text, "**yoso-32**")[2] == "37.00 (1)"
    assert line(text, "**yoso-32**")[7] == "70.00 (1)"
    assert line(text, "**yoso-32**")[4] == ""
    assert line(text, "the commonest class")[7:] == ["50", ""]
    assert line(text, "exact, Xiong")[7:] == ["", "58.77"]
    assert "not AAN" in text
    assert "not AAN" not in lra.markdown([row()])


def test_a_terminal_sees_ours_and_published_and_how_long_it_took():
    rows = [row(seed=s, accuracy=a) for s, a in enumerate((0.36, 0.38))]
    text = lra.lines([*rows, row("image", method="nystrom", steps=100, accuracy=0.41)])
    assert text[1].split() == ["protocol", "listops", "image"]
    ours, published = text[2], next(x for x in text if x.startswith("YOSO-E, Zeng"))
    assert ours.split() == ["yoso-32", "longspan", "37.00", "±", "1.41", "(2)"]
    assert published.split()[-3:] == ["published", "37.3", "39.8"]
    runs = [x.split() for x in text[-3:-1]]
    assert runs[0][:6] == ["listops", "yoso-32", "longspan", "5,000", "0,", "1"]
    assert runs[1][-2:] == ["60", "2"]  # seconds, and runs at once
    changed = [row(seed=seed, settings="graph=true warmup=9") for seed in (1, 3, 4, 5, 7, 8)]
    (said,) = [x for x in lra.lines(changed) if x.endswith("warmup=9")]
    assert "  1, 3 to 5, 7, 8  " in said
    assert lra.lines([]) == []
    assert lra.lines([{**rows[0], "recipe": {"length": 2048}}]) == []  # not of the arena's recipes


def test_other_rows_are_left_alone(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    records.append(path, {"kind": "training", "task": "mlm", "method": "yoso"})
    for wrong in (path, tmp_path / "nowhere.jsonl"):
        with pytest.raises(SystemExit, match="must hold rows of lra/… tasks, got none"):
            lra.main(wrong)
    records.append(path, {k: v for k, v in row().items() if k != "environment"})
    lra.main(path)
    assert capsys.readouterr().out == f"Wrote {tmp_path / 'rows.md'}\n"
    assert "**yoso-32**" in (tmp_path / "rows.md").read_text()
