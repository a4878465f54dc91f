import json
import re
import subprocess
import sys

import pytest

from longspan.report import Crossover, crossover, exact_seconds, milliseconds, times, write_page
from longspan.report.charts import accuracy_chart, main_setting, style, time_chart
from longspan.report.crossover import crossovers
from longspan.report.page import content
from longspan.report.summary import summary

LENGTHS = (512, 1024, 2048, 4096, 8192)


def quadratic(lengths=LENGTHS):
    return {n: 1e-8 * n**2 for n in lengths}


def linear(crossing, lengths=LENGTHS):
    """As fast as `quadratic` at `crossing`, faster beyond."""
    return {n: 1e-8 * crossing * n for n in lengths}


@pytest.mark.parametrize("crossing", [600, 1024, 3000, 8000])
def test_crossover_of_power_laws_is_exact(crossing):
    point = crossover(quadratic(), linear(crossing))
    assert point.length == pytest.approx(crossing)
    assert point.seconds == pytest.approx(1e-8 * crossing**2)
    assert not point.extrapolated


def test_crossover_beyond_the_last_exact_length_is_marked():
    point = crossover(quadratic(LENGTHS[:3]), linear(3000))
    assert point.length == pytest.approx(3000)
    assert point.extrapolated
    assert str(point) == "about 3,000 (exact attention extrapolated)"


def test_crossover_before_the_last_exact_length_is_not_marked():
    assert not crossover(quadratic(LENGTHS[:3]), linear(1500)).extrapolated


def test_faster_from_the_start_and_never():
    assert crossover(quadratic(), linear(300)).length == 512
    assert str(crossover(quadratic(), linear(300))) == "512 or shorter"
    assert crossover(quadratic(), linear(9000)).length is None
    assert str(crossover(quadratic(), linear(9000))) == "not up to 8,192"


def test_a_lead_that_is_lost_again_does_not_count():
    other = {**linear(300), 4096: 1.0}
    assert 4096 < crossover(quadratic(), other).length < 8192


def test_nothing_in_common_gives_none():
    assert crossover({}, linear(600)) is None
    assert crossover({4096: 1.0}, {512: 1.0}) is None


def test_exact_attention_goes_on_with_the_square():
    assert exact_seconds({512: 1.0, 1024: 3.0}, 1024) == 3.0
    assert exact_seconds({512: 1.0, 1024: 3.0}, 4096) == 48.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.000123, "0.123"), (0.01, "10.0"), (0.0421, "42.1"), (0.421, "421"), (4.21, "4,210")],
)
def test_milliseconds(seconds, text):
    assert milliseconds(seconds) == text


def rows(training=True, end=True):
    stamp = {"cpu": "A <fast> one", "cores": 2, "gpu": None}
    made = [{"kind": "run", "command": "longspan demo --seed 3", "environment": stamp}]
    shape = {"batch": 1, "heads": 8, "head_dim": 64, "dtype": "float32", "device": "cpu"}
    for mode, factor in (("forward", 1), ("forward+backward", 3)):
        for method, seconds in (("softmax", quadratic()), ("nystrom", linear(1500))):
            for n, t in seconds.items():
                row = {"mode": mode, "method": method, "length": n}
                if method == "softmax" and n == 8192:
                    made.append({"kind": "stopped", **row, "predicted": t})
                else:
                    made.append({"kind": "timing", **row, **shape, "seconds": factor * t})
    for method, speed, right in (
        (("softmax", 0.5, 0.96), ("nystrom", 0.1, 0.95)) if training else ()
    ):
        for step in range(1, 11):
            made.append(
                {
                    "kind": "training",
                    "method": method,
                    "description": "A task.",
                    "length": 4096,
                    "batch": 4,
                    "step": step,
                    "steps": 10,
                    "chance": 0.125,
                    "loss": 2.0 / step,
                    "seconds": speed * step,
                    "accuracy": right * step / 10 if step % 5 == 0 else None,
                }
            )
    return [*made, {"kind": "end"}] if end else made


def test_summary_names_numbers_that_follow_from_the_rows():
    forward, training, learned = summary(rows())
    assert "At 4,096 tokens one forward pass of exact attention takes 168 ms" in forward
    assert "nystrom, the fastest of the others, takes 61.4 ms: 2.7× faster" in forward
    assert "below about 1,500 tokens exact attention is the fastest" in forward
    assert "forward and backward pass" in training
    assert "answers 96% of new questions after 5 s; nystrom answers 95% after 1 s" in learned


def test_summary_does_not_boast_of_what_was_not_learned():
    weak = [{**row, "accuracy": 0.1} if row.get("accuracy") else row for row in rows()]
    assert "too few" in summary(weak)[-1]
    assert summary([]) == []


def section(shown, title):
    return next(s for s in shown["sections"] if s.title.startswith(title))


def cells(table):
    return {line[0]: list(line[1:]) for line in table.lines}


def test_content_has_every_cell():
    shown = content(rows())
    assert shown["legend"] == ["softmax", "nystrom"]
    forward = cells(section(shown, "Time").tables[0])
    assert forward["softmax"][-1] == "stopped"
    assert forward["nystrom"][0] == milliseconds(linear(1500)[512])
    assert cells(section(shown, "From which length").tables[0])["nystrom"][0] == "about 1,500"
    learned = cells(section(shown, "Training on a task").tables[0])
    assert [learned[m][0] for m in ("softmax", "nystrom")] == ["96.0%", "95.0%"]


def test_of_several_runs_the_last_is_shown():
    assert content([*rows(training=False), *rows()]) == content(rows())
    titles = [s.title for s in content([*rows(), *rows(training=False)])["sections"]]
    assert not any(title.startswith("Training") for title in titles)


def test_time_chart_extrapolates_and_rings():
    table = times(rows(), "forward")
    traces = time_chart(table)["data"]
    dotted = [t for t in traces if t["line"].get("dash") == "dot"]
    assert dotted[0]["x"] == [4096, 8192]
    assert dotted[0]["y"][1] == pytest.approx(4 * dotted[0]["y"][0], rel=1e-4)
    rings = [t for t in traces if t["mode"] == "markers"]
    assert [(t["name"], round(t["x"][0])) for t in rings] == [("nystrom", 1500)]


def test_colours_are_distinct_and_the_same_everywhere():
    import longspan

    assert len({style(method) for method in longspan.METHODS}) == len(longspan.METHODS)
    assert style("nystrom-64") == style("nystrom") == style("nystrom num_landmarks=8")
    assert style("yoso_expectation hash_bits=4") == style("yoso_expectation") != style("yoso-16")
    assert main_setting("yoso-32")
    assert not main_setting("yoso-16")
    assert len({style(method)[0] for method in longspan.METHODS}) == len(longspan.METHODS)
    training = {"yoso": [{"seconds": 1.0, "accuracy": 0.5, "step": 1, "loss": 1.0}]}
    assert accuracy_chart(training, 0.1)["data"][0]["line"]["color"] == style("yoso")[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return write_page(rows(), tmp_path_factory.mktemp("page") / "new" / "index.html").read_text()


def test_page_loads_nothing_from_outside(page):
    for pattern in (
        r"<script[^>]*\ssrc",
        r"<link[^>]*\shref",
        r"<img[^>]*\ssrc=.?http",
        r"@import",
    ):
        own = re.sub(r"<script>.*?</script>", "<script></script>", page, flags=re.S)
        assert not re.search(pattern, own)
    assert "http" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert page.count("plotly.js v") == 1


def test_page_says_what_was_measured(page):
    assert page.index(summary(rows())[0].split(";")[0]) < page.index('id="crossover-forward"')
    for text in ("longspan demo --seed 3", "A task.", "about 1,500", "stopped", "96.0%"):
        assert text in page
    assert "A &lt;fast&gt; one" in page
    assert "was stopped before its end" not in page


def test_charts_in_the_page_are_json(page):
    figures = re.findall(r'draw\("[a-z0-9-]+", (\{.*?\})\);', page)
    assert len(figures) == 6  # crossover and time of both modes, accuracy, loss
    assert all(json.loads(figure)["data"] for figure in figures)


def test_page_of_an_interrupted_run_says_so(tmp_path):
    text = write_page(rows(training=False, end=False), tmp_path / "index.html").read_text()
    assert "was stopped before its end" in text
    assert "held-out" not in text


def test_training_that_is_not_described_is_shown(tmp_path):
    plain = [{k: v for k, v in row.items() if k != "description"} for row in rows()]
    assert "Guessing is right" in write_page(plain, tmp_path / "index.html").read_text()


def test_page_of_no_rows_is_still_a_page(tmp_path):
    assert "<main>" in write_page([], tmp_path / "index.html").read_text()


def test_a_name_cannot_end_the_script(tmp_path):
    bad = [
        {**row, "method": "</script>"} if row.get("method") == "nystrom" else row for row in rows()
    ]
    text = write_page(bad, tmp_path / "index.html").read_text()
    assert text.count("</script>") == text.count("<script>")


def test_report_needs_plotly_and_jinja_only_to_draw():
    code = "import sys, longspan.report; sys.exit(bool({'plotly', 'jinja2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_crossover_is_plain_data():
    assert crossover(quadratic(), linear(1024)) == Crossover(
        1024.0, 1e-8 * 1024**2, False, 512, 8192
    )


def test_crossovers_are_those_of_default_settings_by_mode_and_device():
    made = []
    for name, crossing in (("nystrom-64", 1531), ("nystrom-32", 300), ("window-257", 300)):
        for n, t in linear(crossing).items():
            made.append((name, n, t))
    made += [("softmax", n, t) for n, t in quadratic().items()]
    made += [("strided", n, 9.0) for n in LENGTHS]
    shape = {"kind": "timing", "suite": "length", "mode": "forward", "device": "cuda:0"}
    found = [{**shape, "name": m, "method": m, "length": n, "seconds": t} for m, n, t in made]
    assert crossovers(found, "cuda") == {
        "forward": {"nystrom": 1500, "window": 512, "strided": None},
        "forward+backward": {},
    }
    assert crossovers(found, "cpu") == {"forward": {}, "forward+backward": {}}
    assert crossovers([{**row, "suite": "cpu"} for row in found], "cuda")["forward"] == {}
