"""Reference or fused: one decision, with its reasons."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from longspan.attention import checks

IMPLEMENTATIONS = ("auto", "fused", "reference")


def select(
    impl: str,
    *,
    reference: Callable,
    fused: Callable | None = None,
    reasons: list[str],
) -> Callable:
    """Return the implementation to call; `reasons` says why `fused` cannot run here.

    `"auto"` takes the fused one where it can run; an explicit request never falls back.
    """
    checks.choice("impl", impl, IMPLEMENTATIONS)
    if impl == "reference" or (impl == "auto" and reasons):
        return reference
    if reasons:
        raise NotImplementedError(f"impl='fused' cannot run: {'; '.join(reasons)}")
    assert fused is not None
    return fused


def no_kernel(name: str, device: torch.device) -> list[str]:
    """The reason of a method whose kernels do not exist yet."""
    return [f"{name} has no fused kernel for {device.type} devices"]


def why_not_cuda(name: str, device: torch.device) -> list[str]:
    """Why a method's kernels for NVIDIA GPUs cannot run on a device; empty where they can."""
    if device.type != "cuda":
        return no_kernel(name, device)
    # Asking takes as long as a launch; a compiler asks once.
    return (_why_not_cuda if torch.compiler.is_compiling() else _known)(name, device)


def _why_not_cuda(name: str, device: torch.device) -> list[str]:
    if not torch.cuda.is_available():
        return [f"{name} needs an NVIDIA GPU, and torch sees none"]
    reasons = []
    try:
        import cuda.core  # noqa: F401
        import triton  # noqa: F401
    except ImportError as error:
        reasons.append(f"{name} needs {error.name} (pip install 'longspan[cuda]')")
    if torch.cuda.get_device_capability(device) < (8, 0):
        reasons.append(f"{name} needs a GPU of compute capability 8.0 or newer")
    return reasons


_known = functools.cache(_why_not_cuda)


def why_not_these(name: str, q: Tensor, v: Tensor, most: int) -> list[str]:
    """Why Triton kernels for up to `most` channels cannot run on these tensors."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return [f"{name} has no fused kernel for {q.dtype}"]
    if max(q.shape[3], v.shape[3]) > most:
        return [f"{name} has no fused kernel for more than {most} channels of {q.dtype}"]
    return []


def learns(*inputs: Tensor) -> bool:
    """Whether a gradient may be asked of what is made of these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output for an empty batch: nothing to launch, and still a function of all three."""
    return (q.sum() + k.sum()) * v.new_zeros(0, q.shape[1], q.shape[2], 1) * v.sum(2, True)
