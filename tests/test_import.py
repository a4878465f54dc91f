"""`import longspan` needs torch alone, is quick, silent, and touches nothing."""

import subprocess
import sys
import textwrap


def fresh(program):
    """Run a program in a fresh interpreter; return what it printed."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error::DeprecationWarning:longspan",
            "-c",
            textwrap.dedent(program),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_import_prints_nothing():
    assert fresh("import longspan") == ("", "")


def test_import_needs_torch_alone():
    """Nothing is imported from outside the standard library that torch did not bring."""
    out, _ = fresh(
        """
        import sys
        import torch
        before = set(sys.modules)
        import longspan
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*sorted(new - sys.stdlib_module_names - {"longspan", "torch"}))
        """
    )
    assert out.split() == []


def test_import_takes_under_three_tenths_of_a_second():
    program = """
        import time
        import torch
        start = time.perf_counter()
        import longspan
        print(time.perf_counter() - start)
        """
    # The best of three: a busy machine slows an import, nothing speeds it up.
    assert min(float(fresh(program)[0]) for _ in range(3)) < 0.3


def test_import_compiles_nothing_and_reads_no_environment_variable():
    out, _ = fresh(
        """
        import os
        import subprocess
        import torch

        class Watched(dict):
            def __getitem__(self, key):
                print("environment", key)
                return super().__getitem__(key)
            def get(self, key, default=None):
                print("environment", key)
                return super().get(key, default)
            def __contains__(self, key):
                print("environment", key)
                return super().__contains__(key)

        def forbidden(*args, **kwargs):
            print("subprocess", args)
        os.environ = Watched(os.environ)
        os.getenv = os.environ.get
        subprocess.Popen = os.system = torch.compile = forbidden
        import longspan
        """
    )
    assert out == ""


def test_import_works_without_the_extras():
    names = ["typer", "rich", "plotly", "jinja2", "numpy", "transformers", "triton"]
    fresh(f"import sys, torch; sys.modules.update(dict.fromkeys({names!r})); import longspan")


def test_what_needs_transformers_says_so_without_it():
    out, _ = fresh(
        """
        import sys, torch
        sys.modules["transformers"] = None
        import longspan
        for name in ("convert", "extend_positions", "huggingface", "models"):
            try:
                getattr(longspan, name)
            except ModuleNotFoundError as error:
                print(error)
        """
    )
    for name in ("convert", "extend_positions", "huggingface", "models"):
        assert f"longspan.{name} needs transformers: pip install 'longspan[huggingface]'" in out


def test_transformers_is_imported_when_it_is_asked_for():
    out, _ = fresh(
        """
        import sys, longspan
        print("transformers" in sys.modules)
        longspan.models.LongspanConfig
        print("transformers" in sys.modules, hasattr(longspan, "no_such_name"))
        """
    )
    assert out.split() == ["False", "True", "False"]
