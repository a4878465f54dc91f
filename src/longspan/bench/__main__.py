"""`python -m longspan.bench`: the suites without typer and rich, for a machine that has neither."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys

from longspan.bench.suite import Setting, run
from longspan.bench.suites import SUITES, default_device, plan


def main(arguments: list[str] | None = None) -> None:
    """The command line; `longspan bench` takes the same options."""
    parser = argparse.ArgumentParser(prog="python -m longspan.bench")
    parser.add_argument("suites", nargs="+", choices=SUITES, metavar="SUITE")
    parser.add_argument("-o", "--output", default="longspan-bench/rows.jsonl")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, action="append", default=[])
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--model")
    parser.add_argument("--text")
    parser.add_argument("--fresh", action="store_true")
    given = parser.parse_args(arguments)
    setting = Setting(
        given.device, given.quick, given.seed, tuple(given.length), given.model, given.text
    )
    words = sys.argv[1:] if arguments is None else arguments
    run(
        plan(given.suites, setting),
        given.output,
        setting,
        only=given.only,
        fresh=given.fresh,
        command=shlex.join(["python", "-m", "longspan.bench", *words]),
        say=functools.partial(print, flush=True),
    )


if __name__ == "__main__":
    main()
