"""Files of rows in, a folder with a page and its pictures out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from longspan.report.page import content, write_page
from longspan.report.pictures import write_pictures
from longspan.report.reading import read


def write_report(
    files: Iterable[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    *,
    pictures: bool = True,
) -> tuple[list[str], list[str]]:
    """Write `index.html` and the pictures of its charts into `folder`.

    Returns what was made, with the tables of the Long Range Arena, and what was left out, line by
    line. Raises `ValueError` where the files hold no row that can be drawn, and
    `ModuleNotFoundError` with what to install.
    """
    # A command of its own, too: Python warns where a package imports what is then run.
    from longspan.report import lra

    files = list(files)
    rows, problems = read(files)
    if not rows:
        names = ", ".join(str(path) for path in files)
        raise ValueError(f"rows must hold something to draw, got {'; '.join(problems) or names}")
    folder = Path(folder)
    try:
        shown = content(rows)
        page = write_page(rows, folder / "index.html", problems)
        made = [*shown["summary"], *lra.lines(rows), f"Page: {page.resolve()}"]
        if pictures:
            charts = [chart for section in shown["sections"] for chart in section.charts]
            files = write_pictures(charts, folder / "pictures")
            made.append(f"Pictures: {len(files)} in {(folder / 'pictures').resolve()}")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"report needs {error.name}: pip install 'longspan[report]' brings it"
        ) from None
    return made, problems
