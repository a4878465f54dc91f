"""torch.library ops for CUDA, without the checks of `custom_op`, which take as long as a launch."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_library = torch.library.Library("longspan", "FRAGMENT")


def op(run: Callable) -> Callable:
    """Register a function as the op `torch.ops.longspan.<its name>` on NVIDIA GPUs.

    It runs on the device of its first tensor, and as a function on any that it can.
    """

    @functools.wraps(run)
    def there(first: torch.Tensor, *more: Any) -> Any:
        with _on(first.device):
            return run(first, *more)

    _library.define(run.__name__ + torch.library.infer_schema(run, mutates_args=()))
    _library.impl(run.__name__, there, "CUDA")
    return run


def fake(run: Callable) -> Callable[[Callable], Callable]:
    """Register what tells the shapes of an op's results, for compilers."""
    return torch.library.register_fake(f"longspan::{run.__name__}", lib=_library)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one; torch's own way asks much where it is already."""
    if device.index == torch._C._cuda_getDevice():
        return nullcontext()
    return torch.cuda.device(device)
