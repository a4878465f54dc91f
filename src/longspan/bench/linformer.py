"""`linformer`: the n × k grid of the Linformer paper, beside exact attention fused and eager.

The paper gives the gain in inference of a whole model; here attention alone is timed, forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from longspan.bench import length as over_length
from longspan.bench.cases import MODES
from longspan.bench.suite import Group, Setting

PROJECTED = (128, 256, 512, 1024, 2048)


def groups(setting: Setting) -> Iterator[Group]:
    """Every length with the projected lengths up to half of it, as in the paper."""
    quick = (512, 1024, 2048, 4096)
    full = tuple(512 << i for i in range(8))
    for length in setting.lengths or (quick if setting.quick else full):
        names: dict[str, tuple[str, dict[str, Any]]] = {
            name: over_length.NAMES[name] for name in ("softmax", "eager")
        }
        for projected in PROJECTED:
            if 2 * projected <= length:
                options = {"projected_length": projected}
                names[f"linformer-{projected}"] = ("linformer", options)
        yield over_length.group(length, MODES[0], setting, names=names)
