"""One grammar of errors: `{argument} must {requirement}, got {value}`.

Every public function checks its arguments here, once; nothing below it checks again.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check that queries (B, H, Nq, D), keys (B, H, Nk, D) and values (B, H, Nk, Dv) agree."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape (B, H, N, D), got {_shape(x)}")
        if not x.is_floating_point():
            raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}")
        if x.numel() == 0 and 0 in x.shape[1:]:
            raise ValueError(
                f"{name} must have at least one head, token and channel, got {_shape(x)}"
            )
    batch, heads, _, channels = q.shape  # parts of a torch.Size take long to make
    for name, x in (("k", k), ("v", v)):
        if x.size(0) != batch or x.size(1) != heads:
            raise ValueError(
                f"{name} must have the batch size and heads of q {_shape(q)}, got {_shape(x)}"
            )
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q ({q.dtype}), got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {x.device}")
    if k.size(3) != channels:
        raise ValueError(f"k must have the head dimension of q ({channels}), got {k.shape[3]}")
    if v.size(2) != k.size(2):
        raise ValueError(f"v must have the length of k ({k.shape[2]}), got {v.shape[2]}")


def key_mask(mask: Tensor | None, k: Tensor) -> None:
    """Check that a key mask is boolean (B, Nk), on the keys' device."""
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise TypeError(f"key_mask must be a torch.Tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be boolean (true = attend), got {mask.dtype}")
    expected = (k.shape[0], k.shape[2])
    if tuple(mask.shape) != expected:
        raise ValueError(f"key_mask must have shape (B, Nk) = {expected}, got {_shape(mask)}")
    if mask.device != k.device:
        raise ValueError(f"key_mask must be on the device of k ({k.device}), got {mask.device}")


def integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Check that `value` is an integer within low…high."""
    bounds = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {bounds}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {bounds}, got {value}")


def number(name: str, value: object, low: float) -> None:
    """Check that `value` is a number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of at least {low}, got {value!r}")
    if not value >= low:
        raise ValueError(f"{name} must be a number of at least {low}, got {value}")


def boolean(name: str, value: object) -> None:
    """Check that `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be true or false, got {value!r}")


def choice(name: str, value: object, options: Iterable[str]) -> None:
    """Check that `value` is one of `options`; the error names the nearest."""
    options = list(options)
    if value not in options:
        listed = ", ".join(repr(option) for option in options)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}{_nearest(value, options)}")


def scale(value: object) -> None:
    """Check that a score scale is a number or None (1/√D)."""
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"scale must be a number or None, got {value!r}")


def seed(value: object) -> None:
    """Check that a seed is None, an integer below 2**63 or a 0-d integer tensor."""
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.dtype != torch.int64:
            raise TypeError(f"seed must be a 0-d int64 tensor, got {_shape(value)} {value.dtype}")
    elif value is not None:
        integer("seed", value, 0, 2**63 - 1)


def options(
    function: Callable, given: Iterable[str], *, owner: str, also: Iterable[str] = ()
) -> None:
    """Check that every given option is a keyword of `function`, or in `also`.

    The error names the nearest.
    """
    # Asking takes longer than a launch; a compiler asks once.
    keywords = _keywords if torch.compiler.is_compiling() else _known_keywords
    known = [*keywords(function), *also]
    for name in given:
        if name not in known:
            listed = ", ".join(known)
            raise TypeError(
                f"options of {owner} must be among {listed}, got {name!r}{_nearest(name, known)}"
            )


def _keywords(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "key_mask"]
    return known + [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][3:]


_known_keywords = functools.cache(_keywords)


def _nearest(value: object, options: list[str]) -> str:
    match = difflib.get_close_matches(str(value), options, n=1)
    return f" (did you mean {match[0]!r}?)" if match else ""


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
