"""Tables and plot of the GPU benchmark, from made-up rows with a known law of time."""

import re

import pytest

from longspan import records
from longspan.bench import MODES, Timing, gpu, timing_row
from longspan.report import fused
from longspan.report import gpu as report

EXACT, HASHES = 1e-12, 1e-10  # seconds a pair of tokens; a token and hash
HOST = 1e-4  # until a call returns


def seconds(contender, mode):
    case = contender.case
    tokens = case.heads * case.length * (1 if mode == "forward" else 4) * case.head_dim / 64
    if case.method == "softmax":
        return EXACT * tokens * case.length * (2 if "flash" in contender.name else 1)
    if case.method == "yoso_expectation":
        return 1.2 * EXACT * tokens * case.length
    crowded = {"spread": 1, "clustered": 2, "one-key": 3, "one-vector": 3.5}[case.inputs]
    return HASHES * tokens * case.options["num_hashes"] * crowded


def made_up():
    for group in gpu.groups():
        head_dim, length, mode, _ = group
        for contender in gpu.contenders(*group):
            case = contender.case
            v_bytes = 2 * case.heads * length * head_dim
            outputs = v_bytes * (1 if mode == "forward" else 4)
            t = seconds(contender, mode)
            exact = EXACT * case.heads * length**2 * (1 if mode == "forward" else 4) * head_dim / 64
            yield timing_row(case, mode, Timing(t, t, t, 3, HOST)) | {
                "suite": "yoso-gpu", "name": contender.name, "key": contender.key(mode),
                "exact_seconds": exact, "v_bytes": v_bytes, "outputs_bytes": outputs,
                "peak_bytes": None if contender.graph else int(outputs + 2.5 * v_bytes),
                "graph": contender.graph,
                "environment": {**records.environment(), "gpu": "Toy GPU"},
            }  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return list(made_up())


def section(text, title):
    return re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", text, re.DOTALL | re.MULTILINE)[1]


def cells(text, title, length):
    """A line of a table as {column: cell}."""
    lines = [
        line.strip("| ").split(" | ") for line in section(text, title).splitlines() if "|" in line
    ]
    line = next(line for line in lines if line[0] == f"{length:,}")
    return dict(zip(lines[0], line, strict=False))


def test_tables_hold_times_ratios_and_memory(rows):
    text = report.markdown(rows)
    assert text.startswith("# YOSO on one Toy GPU\n")
    line = cells(text, "Forward, heads of 64", 16384)
    # 2^18 · 2^14 pairs of 10⁻¹² s; 2^18 tokens · 32 hashes of 10⁻¹⁰ s.
    assert line["softmax cuDNN"] == "4.295 (1.00×)"
    assert line["softmax flash"] == "8.590 (0.50×)"
    assert line["yoso 32"] == line["yoso 32, log2 n bits"] == "0.839 (5.12×)"
    assert cells(text, "Forward, heads of 64", 131072)["yoso 16"] == "0.419 (81.9×)"
    assert line["yoso_expectation"] == ""  # short inputs alone
    assert cells(text, "Forward, heads of 64", 2048)["yoso_expectation"] == "0.644 (0.83×)"
    both = cells(text, "Forward and backward, heads of 64", 16384)
    assert "yoso 32, backward_hashes=8" in both
    for length in (512, 131072):  # of the longest 16 bits, the most there are
        assert cells(text, "Forward, heads of 128", length)["yoso 32, log2 n bits"] != ""
    assert "other bits" not in text
    memory = text[text.index("## Peak memory") :]
    above = cells(memory, "Forward and backward, heads of 64", 8192)
    assert above["yoso 32"] == "2.50"
    assert "yoso 32, graph" in both
    assert "yoso 32, graph" not in above


def test_tables_compare_inputs_and_hashes(rows):
    text = report.markdown(rows)
    crowded = text[text.index("## Inputs that crowd") :]
    line = cells(crowded, "Forward, heads of 64", 4096)
    assert line["yoso 32, clustered"].endswith("(2.00×)")
    assert line["yoso 32, one-vector"].endswith("(3.50×)")
    half = cells(text, "Half the hashes", 65536)
    assert half["d = 64, forward"] == half["d = 64, forward, graph"] == "2.00×"
    host = cells(text, "Forward, until it returned", 16384)
    assert host["yoso 32"] == "100 (12%)"
    assert "yoso 32, graph" not in host
    line = cells(text, "Forward, heads of 64, by number type", 16384)
    assert line["softmax efficient, float32"] == "4.295 (1.00×)"
    assert line["yoso 32, float16"] == "0.839 (5.12×)"
    assert "float16" not in section(text, "Forward, heads of 64")
    slopes = section(text, "Slope")
    assert "| softmax cuDNN | 2.00 | 2.00 |" in slopes
    assert "| yoso 32 | 1.00 | 1.00 |" in slopes


def test_the_last_row_of_a_key_counts_and_old_ones_are_passed_over(rows):
    again = {**rows[3], "seconds": 1.0}
    old = {key: value for key, value in rows[3].items() if key != "key"}
    other = {**rows[5], "environment": {**rows[5]["environment"], "gpu": "another"}}
    found = report.latest([old, other, *rows, again])
    assert len(found) == len(rows)
    assert [row["seconds"] for row in found if row["key"] == again["key"]] == [1.0]


def test_rows_from_before_the_host_was_timed_have_no_table_of_it(rows):
    assert "## The host" in report.markdown(rows)
    older = [{k: v for k, v in row.items() if k != "host_seconds"} for row in rows]
    assert "## The host" not in report.markdown(older)


def test_what_rows_say_of_themselves_is_shown(rows):
    assert "Of " not in report.markdown(rows).split("## Time")[0]
    noted = [{**row, "note": "read off a wall"} if i < 2 else row for i, row in enumerate(rows)]
    assert f"Of {len(rows)} rows, 2: read off a wall." in report.markdown(noted)


@pytest.mark.parametrize("part", ["all", "forward-of-few-lengths"])
def test_files_are_written_beside_the_rows(rows, part, tmp_path, capsys):
    if part != "all":
        rows = [r for r in rows if r["mode"] == MODES[0] and r["length"] < 2048]
    path = tmp_path / "rows.jsonl"
    for row in rows:
        records.append(path, row)
    report.write(path, report.markdown, report.draw)
    assert (tmp_path / "rows.md").read_text().count("\n| ---:") >= 3
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert "rows.png" in capsys.readouterr().out


def test_no_rows_and_no_matplotlib_are_said(rows, tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("")
    with pytest.raises(SystemExit, match=r"must hold rows of the suite that this draws, got none"):
        report.write(path, report.markdown, report.draw)
    records.append(path, rows[0])
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    report.write(path, report.markdown, report.draw)
    assert "matplotlib is missing" in capsys.readouterr().out


def test_fused_methods_have_tables_and_a_plot(tmp_path):
    """Of rows of one key the last counts; ratios are to the faster exact kernel."""
    path = tmp_path / "rows.jsonl"
    shape = dict(kind="timing", suite="fused-gpu", heads=64, batch=1, head_dim=64, dtype="bfloat16")
    for mode in MODES:
        for name, seconds in (
            ("softmax cuDNN", 4e-3), ("softmax flash", 5e-3), ("nystrom fused", 9.0),
            ("nystrom fused", 1e-3), ("softmax cuDNN, graph", 3e-3), ("nystrom fused, graph", 5e-4),
        ):  # fmt: skip
            name, _, graph = name.partition(", ")
            row = dict(name=name, mode=mode, length=4096, seconds=seconds, peak_bytes=3 << 20)
            records.append(path, shape | row | ({"graph": True} if graph else {}))
    report.write(path, fused.markdown, fused.draw)
    text = (tmp_path / "rows.md").read_text()
    assert text.count("| 4,096 | 4.000 (1.00×) | 5.000 (0.80×) | 1.000 (4.00×) |") == 2
    assert text.count("| 4,096 | 3 | 3 | 3 |") == 2
    assert text.count("as a CUDA graph") == 2
    assert text.count("| 4,096 | 3.000 (1.00×) | 0.500 (6.00×) |") == 2
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")
    assert "rows of" not in text
    assert "padded" not in text
    for name, seconds in (("softmax, padded", 8e-3), ("nystrom fused, padded", 2e-3)):
        row = dict(name=name, mode="forward", length=4096, seconds=seconds, peak_bytes=3 << 20)
        records.append(path, shape | row | {"inputs": "padded"})
    report.write(path, fused.markdown, fused.draw)
    text = (tmp_path / "rows.md").read_text()
    assert text.count("| 4,096 | 8.000 (1.00×) | 2.000 (4.00×) |") == 1
    assert text.count("| 4,096 | 4.000 (1.00×) | 5.000 (0.80×) | 1.000 (4.00×) |") == 2
    row = shape | dict(name="window fused", mode="forward", length=4096, seconds=1, peak_bytes=1)
    records.append(path, row | {"command": "later"})
    report.write(path, fused.markdown, fused.draw)
    assert "These are rows of 2 runs: " in (tmp_path / "rows.md").read_text()
    assert "; window fused by `later`." in (tmp_path / "rows.md").read_text()
    assert fused.markdown([]) == ""
