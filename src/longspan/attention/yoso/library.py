"""The library that csrc/ is built into: its structures, its threads, and how it is called."""

import ctypes
import functools
from ctypes import POINTER, Structure, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PATH = Path(__file__).with_name("_cpu.so")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NO_MEMORY, BAD_CODE = 1, 2

handle: ctypes.CDLL | None = None
missing = ""  # why there is none


class _Rows(Structure):
    _fields_ = [("data", c_void_p), *((n, c_int64) for n in ("type", "batch", "head", "token"))]


_KINDS: dict[str, Any] = {"&": _Rows, "*": c_void_p, ".": c_float}
_HASHED = "&q &k *q_codes *k_codes batch heads queries keys channels hashes bits workers"
# The verbs of csrc/yoso.h and their arguments: &rows, *address, .float, and integers.
VERBS = {
    "hash_codes": f"{_HASHED} *planes",
    "hadamard_codes": f"{_HASHED} seed width",
    "compact_codes": "*q_codes *k_codes groups queries keys bits workers",
    "collide": "&x *from_codes *from_mask *to_codes *to_mask *total *y y_type *inverse .scale"
    " batch heads from_tokens to_tokens channels hashes buckets wide workers",
    "through_unit": "&g &y *inverse *out .scale batch heads tokens channels workers",
    "pair_gradients": "&q &k &v *g *key_mask *q_codes *k_codes *dq *dk *parts .scale"
    " batch heads queries keys channels value_channels"
    " hashes used_hashes bits buckets wide slope num_parts seed workers",
}


@functools.cache
def _fields(verb: str) -> list[tuple[str, Any]]:
    return [(f.lstrip("&*."), _KINDS.get(f[0], c_int64)) for f in VERBS[verb].split()]


@functools.cache
def _structure(verb: str) -> type[Structure]:
    return type(verb, (Structure,), {"_fields_": _fields(verb)})


def use(path: Path) -> None:
    """Take the library in a file; where that fails, `missing` says why."""
    global handle, missing
    handle, missing = None, ""
    if not path.exists():
        missing = (
            "yoso's kernels for the CPU were not built: longspan was installed without a C++ "
            "compiler (install one, then pip install --force-reinstall --no-deps longspan)"
        )
        return
    try:
        handle = _load(path)
    except OSError as error:
        missing = f"yoso's kernels for the CPU cannot be loaded: {error}"


def _load(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    found.longspan_instructions.restype = ctypes.c_char_p
    found.longspan_gaussian.argtypes = [c_int64, c_int64, c_void_p, c_int64]
    found.longspan_gaussian.restype = None
    for verb in VERBS:
        function = getattr(found, f"longspan_{verb}")
        function.argtypes, function.restype = [POINTER(_structure(verb))], c_int
    found.longspan_set_parallel_for.argtypes = [c_void_p]
    found.longspan_set_parallel_for.restype = None
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        torch_cpu = Path(torch.__file__).parent / "lib" / name
        if torch_cpu.exists():
            # torch's own pool: its number of threads is obeyed, and no second pool competes.
            pool = ctypes.CDLL(str(torch_cpu)).torch_parallel_for
            found.longspan_set_parallel_for(ctypes.cast(pool, c_void_p))
    return found


def instructions() -> str:
    """The instruction set in use: "avx512", "avx2" or "plain"."""
    assert handle is not None
    return handle.longspan_instructions().decode()


def call(verb: str, **values: Any) -> None:
    """Run a verb on tensors and numbers, without the GIL."""
    kept: list[Tensor] = []  # copies live until the verb returns
    arguments: dict[str, Any] = {}
    for name, kind in _fields(verb):
        value = torch.get_num_threads() if name == "workers" else values[name]
        if isinstance(value, Tensor):
            straight = kind is _Rows and value.stride(3) == 1
            kept.append(value if straight else value.contiguous())
            value = _rows(kept[-1]) if kind is _Rows else kept[-1].data_ptr()
        arguments[name] = value
    status = getattr(handle, f"longspan_{verb}")(_structure(verb)(**arguments))
    if status == NO_MEMORY:
        raise MemoryError(f"yoso's {verb} could not get its scratch memory")
    if status == BAD_CODE:
        raise ValueError("codes must be below the number of buckets")


def _rows(x: Tensor) -> _Rows:
    return _Rows(x.data_ptr(), TYPES[x.dtype], *x.stride()[:3])


use(PATH)
