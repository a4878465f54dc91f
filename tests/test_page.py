"""The page of all suites: rows of every kind, broken ones, and the page in a real browser."""

import json
import re

import browser
import pytest

from longspan.report import read_rows, write_report
from longspan.report.page import content
from longspan.report.pictures import write_pictures
from longspan.report.published import LINFORMER
from longspan.report.summary import summary

LENGTHS = (512, 1024, 2048, 4096)
CPU = {"cpu": "A CPU", "cores": 2, "gpu": None, "torch": "2", "time": "2026-01-02T03:04:05+00:00"}
GPU = {**CPU, "gpu": "A GPU"}


def timing(suite, name, power=1.0, *, stamp=CPU, mode="forward", **more):
    """Rows whose times follow a power of the length, all equal at 1,024 tokens."""
    device = "cuda" if stamp is GPU else "cpu"
    for n in LENGTHS:
        yield {
            "kind": "timing", "suite": suite, "name": name, "method": re.split("[- ]", name)[0],
            "key": f"{suite} {name} {n} {mode} {more}", "mode": mode, "length": n, "batch": 2,
            "heads": 8, "head_dim": 64, "dtype": "float32", "device": device, "options": {},
            "seconds": 0.02 * (n / 1024) ** power, "peak_bytes": int(2**21 * (n / 1024) ** power),
            "command": f"longspan bench {suite}", "load": 0.5, "environment": stamp, **more,
        }  # fmt: skip


def error(name, family, inputs, seconds, value, **options):
    return {
        "kind": "error", "suite": "error", "name": name, "family": family, "inputs": inputs,
        "method": re.split("[- ,]", family)[0], "options": options, "length": 512, "heads": 12,
        "head_dim": 32, "batch": 6, "seconds": seconds, "error_limit": value / 2,
        "error_softmax": value, "model": "a/model", "text": "a text", "environment": CPU,
    }  # fmt: skip


def trained(task, method, accuracy, seed=0, **more):
    return {
        "kind": "training", "task": task, "method": method, "seed": seed,
        "metrics": {"test": {"accuracy": accuracy, "loss": 1.0, "perplexity": 9.0}},
        "best": {"metric": "accuracy"}, "seconds": 9.0, "tokens_per_second": 1e5 * (1 + seed),
        "environment": GPU, "device": "cuda", **more,
    }  # fmt: skip


def rows():
    made = []
    for mode in ("forward", "forward+backward"):
        for name, power in (("softmax", 2), ("nystrom-64", 1), ("nystrom-32", 0.9), ("eager", 2.1)):
            made += timing("length", name, power, mode=mode)
            made += timing("length", name, power, mode=mode, stamp=GPU)
            if name != "eager":
                made += timing(
                    "model", name, power, mode=mode, layers=6, width=256, largest_batch=7
                )
    for name, power in (("softmax", 2), ("eager", 2.2), ("linformer-128", 1), ("linformer-256", 1)):
        made += timing("linformer", name, power)
    for inputs in ("real", "clustered", "spread"):
        made.append(error("softmax", "softmax", inputs, 0.6, 0.0))
        made.append(
            error("nystrom num_landmarks=16", "nystrom", inputs, 0.1, 0.5, num_landmarks=16)
        )
        made.append(
            error("nystrom num_landmarks=64", "nystrom", inputs, 0.3, 0.4, num_landmarks=64)
        )
        made.append(error("yoso num_hashes=8", "yoso", inputs, 0.9, 0.1, num_hashes=8))
    for weights in ("trained", "random"):
        for layer in (0, 1):
            made.append({
                "kind": "spectrum", "suite": "spectrum", "weights": weights, "layer": layer,
                "places": [1, 8, 64], "cumulative": [[0.5, 0.7, 1.0], [0.1, 0.6, 1.0]],
                "at_quarter": [0.8, 0.7], "length": 64, "model": "a/model", "text": "a text",
                "method": "softmax", "environment": CPU,
            })  # fmt: skip
    look = {"entropy": 0.9, "support": 40.0, "likeness": 0.2}
    made.append({
        "kind": "projection", "suite": "spectrum", "layer": 1, "untrained": look, "trained": look,
        "picture": [[0.1, 0.2], [0.3, 0.4]], "options": {"projected_length": 16}, "steps": 9,
        "error_before": 1.2, "error_after": 0.8, "length": 64, "model": "a/model",
        "text": "a text", "method": "linformer", "environment": CPU,
    })  # fmt: skip
    for task, right in (("lra/listops", 0.37), ("lra/image", 0.42)):
        made += [trained(task, "softmax", right), trained(task, "nystrom", right + 0.01, seed=1)]
        made.append(trained(task, "nystrom", right + 0.03, seed=2))
    made.append(trained("glue/sst2", "yoso", 0.812, variant="yoso-32"))
    made.append(trained("mlm", "yoso", 0.5, recipe={"length": 512}))
    return made


@pytest.fixture(scope="module")
def shown():
    return content(rows())


def find(shown, title):
    return next(s for s in shown["sections"] if s.title.startswith(title))


def cells(table):
    return {line[0]: list(line[1:]) for line in table.lines}


def test_every_suite_has_its_section_in_the_order_of_interest(shown):
    titles = [section.title for section in shown["sections"]]
    expected = [
        "From which length it pays, A CPU, 2 cores", "Time, A CPU", "Memory, A CPU",
        "The table of the Nyströmformer paper, today, A CPU", "Error against cost, A CPU",
        "Linformer: length by projected length, A CPU", "A whole encoder: 6 layers of 256, A CPU",
        "Is attention of low rank?, A CPU", "What Linformer's E learns, A CPU",
        "From which length it pays, A GPU", "Time, A GPU", "Memory, A GPU",
        "The table of the Nyströmformer paper, today, A GPU",
        "Long Range Arena", "Masked language models", "GLUE and other fine-tuning",
    ]  # fmt: skip
    assert len(titles) == len(expected)
    assert all(t.startswith(e) for t, e in zip(titles, expected, strict=True)), titles


def test_ids_of_charts_differ(shown):
    ids = [chart.id for section in shown["sections"] for chart in section.charts]
    assert len(set(ids)) == len(ids) > 15
    assert all(re.fullmatch("[a-z0-9-]+", name) for name in ids)


def test_times_and_memory_are_those_of_one_sequence(shown):
    time = cells(find(shown, "Time").tables[0])
    assert time["softmax"][1] == "10.0"  # 20 ms for a batch of two
    memory = cells(find(shown, "Memory").tables[0])
    assert memory["softmax"][1] == "1.00"


def test_the_papers_rows_stand_beside_ours(shown):
    paper = cells(find(shown, "The table of the Nyström").tables[0])
    assert paper["1,024, paper"] == ["186 / 2.4", "", "63 / 1.3", "49 / 1.2"]
    assert paper["1,024, here"] == ["1.00 / 10.0"] * 4
    tables = {table.caption: table for table in find(shown, "Linformer").tables}
    ours = cells(tables["Speed-up over fused exact attention"])
    assert ours["4,096"] == ["4.0×", "4.0×"]
    published = cells(tables["Speed-up, published (V100, whole model)"])
    assert published["4,096"] == [f"{LINFORMER[4096][k][0]}×" for k in (128, 256)]
    assert len([c for c in tables if c.startswith("Memory saving")]) == 3


def test_lra_has_medians_ranges_published_rows_and_a_chart_of_seeds(shown):
    section = find(shown, "Long Range Arena")
    lines = {(line[0], line[1]): list(line[2:]) for line in section.tables[0].lines}
    assert lines["softmax", "here"] == ["37.0", "42.0"]
    assert lines["nystrom", "here"][0] == "39.0 (38.0–40.0)"
    published = lines["Nyströmformer", "Xiong et al. 2021, Table 3"]
    assert published == ["37.1", "41.6"]
    (chart,) = section.charts
    softmax, softmax_ring, nystrom, nystrom_ring = chart.figure["data"]
    assert [x["name"] for x in (softmax, nystrom)] == ["softmax", "nystrom"]
    assert (softmax["y"], nystrom["y"]) == ([37.0, 42.0], [38.0, 40.0, 43.0, 45.0])
    assert (softmax_ring["y"], nystrom_ring["y"]) == ([37.1, 38.2], [37.15, 41.58])
    assert [round(x) for x in nystrom["x"]] == [0, 0, 1, 1]
    assert chart.figure["layout"]["xaxis"]["ticktext"] == ["listops", "image"]


def test_the_chart_of_seeds_has_one_protocol_and_no_method_of_few_tasks():
    """One of three tasks is less than half; rings are where there is a run."""
    tasks = "listops", "text", "image"
    rows = [trained(f"lra/{task}", "yoso_expectation", 0.3, seed) for task in tasks
            for seed in range(2)]  # fmt: skip
    rows.append(trained("lra/text", "yoso_expectation", 0.9, protocol="google"))
    rows.append(trained("lra/text", "softmax", 0.6))
    (chart,) = find(content(rows), "Long Range Arena").charts
    points, rings = chart.figure["data"]
    assert points["name"] == rings["name"] == "yoso_expectation"
    assert points["y"] == [30.0] * 6
    rows += [trained("lra/text", "window", 0.6), trained("lra/listops", "window", 0.3)]
    rows.append(trained("lra/retrieval-wiki", "yoso_expectation", 0.7))  # not of the arena's own
    (chart,) = find(content(rows), "Long Range Arena").charts
    assert {x["name"] for x in chart.figure["data"]} == {"yoso_expectation", "window"}
    assert [len(x["y"]) for x in chart.figure["data"]] == [7, 3, 2, 2]


def test_short_runs_are_marked_and_give_way_to_longer_ones():
    rows = [
        trained("lra/listops", "yoso", 0.2, steps=100, options={"num_hashes": 32}),
        trained("lra/listops", "yoso", 0.3, steps=2000, options={"num_hashes": 32}),
        trained("lra/listops", "yoso", 0.4, steps=5000, protocol="google"),
    ]
    lines = find(content(rows), "Long Range Arena").tables[0].lines
    assert list(lines[0]) == ["yoso-32", "here", "30.0 †"]
    assert list(lines[1]) == ["yoso", "here, google", "40.0"]


def test_averages_are_shown_once_there_is_one_of_ours():
    tasks = "listops", "text", "retrieval", "image", "pathfinder"
    rows = [trained(f"lra/{task}", "nystrom", i / 10) for i, task in enumerate(tasks)]
    for some, last, ours in ((rows[:4], "image", "30.0"), (rows, "average", "20.0")):
        (table,) = find(content(some), "Long Range Arena").tables
        lines = {(line[0], line[1]): line for line in table.lines}
        assert table.head[-1] == last
        assert {len(line) for line in table.lines} == {len(table.head)}
        assert lines["nystrom", "here"][-1] == ours
    assert lines["Nyströmformer", "Xiong et al. 2021, Table 3"][-1] == "59.0"  # of five


def test_more_steps_than_published_do_not_replace_more_seeds():
    rows = [trained("lra/listops", "yoso", 0.30 + seed / 100, seed, steps=5000) for seed in (0, 2)]
    rows.append(trained("lra/listops", "yoso", 0.9, steps=10000))
    lines = find(content(rows), "Long Range Arena").tables[0].lines
    assert list(lines[0])[2] == "31.0 (30.0–32.0)"


def test_runs_of_other_settings_are_not_mixed_in():
    """A seed that was also run otherwise does not take that row's number."""
    rows = [trained("lra/listops", "yoso", 0.30 + seed / 100, seed, steps=9) for seed in range(3)]
    rows.append(trained("lra/listops", "yoso", 0.9, steps=9, settings="x=1", side_by_side=3))
    rows.append(trained("lra/listops", "softmax", 0.4, steps=9, side_by_side=3))
    section = find(content(rows), "Long Range Arena")
    assert list(section.tables[0].lines[0])[2] == "31.0 (30.0–32.0) †"


def test_glue_and_masked_lm_have_tables(shown):
    glue = find(shown, "GLUE").tables[0]
    assert list(glue.head) == ["method", "source", "sst2"]
    assert list(glue.lines[0]) == ["yoso-32", "here", "81.2"]
    assert find(shown, "Masked").tables[0].lines[0][:3] == ["yoso", "512", "test"]


def test_the_summary_speaks_of_every_machine_and_of_errors(shown):
    first, *_, last = summary(rows())
    assert first.startswith("On A CPU, 2 cores: at 4,096 tokens one forward pass of exact")
    assert any(sentence.startswith("On A GPU: at 4,096") for sentence in summary(rows()))
    assert (
        "nearest to exact attention of what is faster than it is nystrom num_landmarks=64" in last
    )
    assert "40%" in last
    assert shown["summary"] == summary(rows())


def test_errors_of_other_shapes_are_not_compared():
    """A method is cheap beside exact attention of its own shape, and charts show one shape."""
    short = [
        error("softmax", "softmax", "real", 0.6, 0.0),
        error("nystrom num_landmarks=16", "nystrom", "real", 0.9, 0.1, num_landmarks=16),
    ]
    long = [
        {**error("softmax", "softmax", "real", 2.0, 0.0), "length": 2048},
        {**error("yoso num_hashes=8", "yoso", "real", 1.0, 0.7, num_hashes=8), "length": 2048},
    ]
    (sentence,) = summary(short + long)
    assert sentence.startswith("On real inputs of 2,048 tokens")
    assert "yoso num_hashes=8, with an error of 70%" in sentence
    (section,) = (s for s in content(short + long)["sections"] if s.title.startswith("Error"))
    assert [line[0] for line in section.tables[0].lines] == ["softmax", "yoso num_hashes=8"]
    assert all("2,048 tokens" in chart.caption for chart in section.charts)


def test_the_last_row_of_a_key_counts():
    old = list(timing("length", "softmax", 2))
    new = [{**row, "seconds": 7.0} for row in old]
    table = find(content([*old, *timing("length", "nystrom-64"), *new]), "Time").tables[0]
    assert set(cells(table)["softmax"]) == {"3,500"}


def test_a_busy_machine_is_admitted():
    busy = [{**row, "load": 6.0} for row in timing("length", "softmax", 2)]
    assert "busy with other work" in find(content(busy), "Time").text
    assert "busy" not in find(content(list(timing("length", "softmax", 2))), "Time").text


@pytest.fixture
def files(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows())) + "\n")
    return path


def test_broken_rows_are_named_and_skipped(files, tmp_path):
    bad = [
        '{"kind": "timing", "mode": "forward", "method": "yoso", "length": 512, "seconds": "1"}',
        '{"kind": "timing", "mode": "forward", "method": "yoso", "length": 512, "seconds": -1}',
        '{"kind": "error", "inputs": "real"}',
        '{"kind": "unheard of"}',
        '{"suite": "yoso-gpu", "kind": "timing"}',
        '{"cut off',
    ]
    other, empty = tmp_path / "bad.jsonl", tmp_path / "empty.jsonl"
    other.write_text("\n".join(bad))
    empty.touch()
    found, problems = read_rows([files, other, empty, tmp_path / "missing.jsonl"])
    assert found == rows()
    for text in (
        "bad.jsonl: 1 row left out: seconds must be a number in a row of kind timing, got '1'",
        "seconds must be positive in a row of kind timing, got -1",
        "method must be of type str in a row of kind error, got None",
        "got 'unheard of'",
        "suite yoso-gpu: python -m longspan.report.gpu draws them",
        "bad.jsonl, line 6: not a JSON object",
        "empty.jsonl: no rows",
        "missing.jsonl: No such file",
    ):
        assert any(text in problem for problem in problems), text
    made, told = write_report([files, other], tmp_path / "out", pictures=False)
    assert "What was left out" in (tmp_path / "out" / "index.html").read_text()
    assert len(told) == 6
    assert made[-1].startswith("Page: ")


def test_nothing_to_draw_is_an_error_that_says_why(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"rows must hold something to draw, got empty.jsonl: no"):
        write_report([tmp_path / "empty.jsonl"], tmp_path)


def test_pictures_are_drawn_of_every_chart(shown, tmp_path):
    charts = [chart for section in shown["sections"] for chart in section.charts]
    some = charts[:2] + [c for c in charts if "spectrum" in c.id or "error-real" in c.id]
    drawn = write_pictures(some, tmp_path)
    assert {path.name for path in drawn} == {f"{c.id}.{e}" for c in some for e in ("png", "svg")}
    svg = (tmp_path / f"{charts[0].id}.svg").read_text()
    assert ">nystrom-64<" in svg
    again = write_pictures(some[:1], tmp_path / "again")
    assert again[1].read_text() == svg


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    if browser.find() is None:
        pytest.skip(browser.MISSING)
    made = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows())) + "\n")
    write_report([folder / "rows.jsonl"], folder, pictures=False)
    return folder / "index.html"


VISIBLE = "[...document.querySelectorAll('.chart')].map(c => c.data.filter(t => t.visible !== false && t.legendgroup === '{}').length).reduce((a, b) => a + b, 0)"  # noqa: E501


def test_in_a_browser_charts_are_drawn_without_errors_or_requests(tab, page, shown):
    tab.open(page, 1200)
    charts = sum(len(section.charts) for section in shown["sections"])
    assert tab.run("document.querySelectorAll('.chart .main-svg').length") >= charts
    assert tab.messages == []
    outside = [url for url in tab.requests if not url.startswith(("data:", "blob:"))]
    assert outside == [page.resolve().as_uri()]


def test_in_a_browser_methods_and_lines_are_hidden_and_shown(tab, page):
    tab.open(page, 1200)
    count = VISIBLE.format("nystrom")
    everywhere = tab.run(count)
    assert everywhere > 10
    button = "document.querySelector('.legend button[data-method=nystrom]')"
    tab.run(f"{button}.click()")
    assert tab.run(count) == 0
    assert tab.run(f"{button}.getAttribute('aria-pressed')") == "false"
    assert tab.run(VISIBLE.format("softmax")) > 0
    tab.run(f"{button}.click()")
    assert tab.run(count) == everywhere
    tab.run("document.querySelector('.chips button[data-name=\"nystrom-32\"]').click()")
    assert tab.run(count) == everywhere - 1
    assert tab.messages == []


def test_in_a_browser_axes_become_linear_and_logarithmic_again(tab, page):
    tab.open(page, 1200)
    kinds = "['xaxis', 'yaxis'].map(a => document.querySelector('.chart')._fullLayout[a].type)"
    assert tab.run(kinds) == ["log", "log"]
    tab.run("document.querySelector('.chips .axes').click()")
    assert tab.run(kinds) == ["linear", "linear"]
    tab.run("document.querySelector('.chips .axes').click()")
    assert tab.run(kinds) == ["log", "log"]
    ticks = "document.querySelector('.chart')._fullLayout.xaxis.tickmode"
    assert tab.run(ticks) == "array"


def test_in_a_browser_hovering_names_the_point(tab, page):
    tab.open(page, 1200)
    tab.run("Plotly.Fx.hover(document.querySelector('.chart'), [{curveNumber: 0, pointNumber: 1}])")
    said = tab.run("document.querySelector('.chart .hoverlayer').textContent")
    assert "nystrom-64" in said


def test_in_a_browser_at_the_width_of_a_phone_all_is_legible(tab, page):
    """Nothing is wider than the screen but tables, which scroll; text has at least 12 pixels."""
    tab.open(page, 390, 844, phone=True)
    assert tab.run("document.documentElement.scrollWidth") <= 390
    small = """[...document.querySelectorAll('p, li, td, th, button, figcaption, dd, code, text')]
      .filter(e => e.textContent.trim() && e.getClientRects().length
        && parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.textContent)"""
    assert tab.run(small) == []
    wide = """[...document.querySelectorAll('main *')]
      .filter(e => !e.closest('.scroll') && e.getBoundingClientRect().right > 391)
      .map(e => e.outerHTML.slice(0, 80))"""
    assert tab.run(wide) == []
    assert tab.run("[...document.querySelectorAll('.chart')].every(c => c.clientWidth > 300)")


def test_in_a_browser_the_page_prints(tab, page):
    tab.open(page, 1200)
    assert tab.pdf().startswith(b"%PDF")
    assert tab.messages == []
