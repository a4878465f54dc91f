"""Reference or fused: one decision, with its reasons."""

from collections.abc import Callable

import torch

from longspan.attention import checks

IMPLEMENTATIONS = ("auto", "fused", "reference")


def select(
    impl: str, *, reference: Callable, fused: Callable | None = None, reasons: list[str]
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
