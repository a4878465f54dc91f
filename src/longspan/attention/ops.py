"""torch.library ops for CUDA, without the checks of `custom_op`, which take as long as a launch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

_library = torch.library.Library("longspan", "FRAGMENT")


def op(run: Callable) -> Callable:
    """Register a function as the op `torch.ops.longspan.<its name>` on NVIDIA GPUs."""
    _library.define(run.__name__ + torch.library.infer_schema(run, mutates_args=()))
    _library.impl(run.__name__, run, "CUDA")
    return run


def fake(run: Callable) -> Callable[[Callable], Callable]:
    """Register what tells the shapes of an op's results, for compilers."""
    return torch.library.register_fake(f"longspan::{run.__name__}", lib=_library)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on a device; torch's own way asks much where it is the current one already."""
    if device.index == torch._C._cuda_getDevice():
        return nullcontext()
    return torch.cuda.device(device)
