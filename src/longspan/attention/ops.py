"""torch.library ops for CUDA, without the checks of `custom_op`, which take as long as a launch."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_library = torch.library.Library("longspan", "FRAGMENT")
_there: dict[str, Callable] = {}  # what ops do on their device
PLAIN = torch.Tensor, torch.nn.Parameter
_HERE = nullcontext()


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
    _there[run.__name__] = there
    return run


def call(name: str, first: torch.Tensor, *more: Any) -> Any:
    """The op of this name, past torch's dispatcher where nothing there would see it go by.

    The dispatcher takes a host as long as two launches. Compilers, modes, transforms and tensors
    of other kinds are to see an op; autograd is not, so call it inside of an autograd function.
    """
    if torch.compiler.is_compiling() or not first.is_cuda or type(first) not in PLAIN:
        return getattr(torch.ops.longspan, name)(first, *more)
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack():
        return getattr(torch.ops.longspan, name)(first, *more)
    return _there[name](first, *more)


def fake(run: Callable) -> Callable[[Callable], Callable]:
    """Register what tells the shapes of an op's results, for compilers."""
    return torch.library.register_fake(f"longspan::{run.__name__}", lib=_library)


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one; torch's own way asks much where it is already."""
    if device.index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(device)
