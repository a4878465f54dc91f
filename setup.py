"""Builds the CPU kernels where there is a C++ compiler; without one longspan installs without them.

A plain shared library, no torch and no Python in it: kernels.cpp once for every instruction set,
and dispatch.cpp, which chooses among them at run time. pyproject.toml says everything else.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/longspan/attention/yoso/csrc")
FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"]
FLAGS += ["-fno-math-errno", "-g0"]
INSTRUCTIONS = {"plain": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    INSTRUCTIONS["avx2"] = ["-mavx2", "-mfma"]
    INSTRUCTIONS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]
    INSTRUCTIONS["avx512"] += ["-mprefer-vector-width=512"]


class Build(build_ext):
    """One object a instruction set, linked into one library."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link; an error is a warning, because the extension is optional."""
        kernels, dispatch = (str(SOURCES / name) for name in ("kernels.cpp", "dispatch.cpp"))
        objects = self.compiler.compile([dispatch], output_dir=self.build_temp, extra_preargs=FLAGS)
        for name, flags in INSTRUCTIONS.items():
            objects += self.compiler.compile(
                [kernels],
                output_dir=str(Path(self.build_temp) / name),
                macros=[("LONGSPAN_ISA", name)],
                extra_preargs=FLAGS + flags,
                depends=ext.depends,
            )
        # g++ would name its library as needed, which the kernels do not use.
        unused = ["-Wl,--as-needed"] if sys.platform.startswith("linux") else []
        self.compiler.link_shared_object(
            objects, self.get_ext_fullpath(ext.name), extra_preargs=unused, target_lang="c++"
        )

    def get_ext_filename(self, name: str) -> str:
        """A name without the version of Python, which the library does not know."""
        return name.replace(".", "/") + ".so"


class Wheel(bdist_wheel):
    """A wheel for every Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "longspan.attention.yoso._cpu",
            sources=[str(SOURCES / "kernels.cpp"), str(SOURCES / "dispatch.cpp")],
            depends=sorted(map(str, SOURCES.glob("*.h"))),
            optional=True,
        )
    ],
    cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
)
