"""One case is one call of one method at one shape, forward alone or with its backward pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import longspan
from longspan.attention.methods import find

MODES = ("forward", "forward+backward")
PROJECTED_LENGTH = 256


@dataclass(frozen=True)
class Case:
    """What is timed: method, shape (B, H, N, D), dtype, device and the method's own options."""

    method: str
    length: int
    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, mode: str, seed: int = 0) -> Callable[[], object]:
        """A call without arguments that runs one pass on inputs drawn once from `seed`.

        `mode` is "forward" (no graph is kept) or "forward+backward" (gradients of queries, keys,
        values and, for methods that have them, of learned projections). Cases of one shape that
        are built in a row share their queries, keys and values.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        training = mode == "forward+backward"
        place = (self.dtype, self.device, training, seed)
        shape = (self.batch, self.heads, self.length, self.head_dim)
        q, k, v = _draw((3, *shape), *place)
        inputs = [q, k, v]
        options = dict(self.options)
        projections = _projections(self.method)
        if projections:
            projected_length = options.pop("projected_length", PROJECTED_LENGTH)
            sizes = (len(projections), projected_length, self.length)
            matrices = _draw(sizes, *place, scale=self.length**-0.5)
            options.update(zip(projections, matrices, strict=True))
            inputs.extend(matrices)

        def forward() -> Tensor:
            with torch.inference_mode():
                return longspan.attention(q, k, v, method=self.method, **options)

        def forward_backward() -> object:
            output = longspan.attention(q, k, v, method=self.method, **options)
            return torch.autograd.grad(output, inputs, torch.ones_like(output))

        return forward_backward if training else forward


# At long lengths the inputs fill the memory, so methods share them; old ones are let go.
@functools.lru_cache(maxsize=2)
def _draw(
    shape: tuple[int, ...], dtype: str, device: str, training: bool, seed: int, scale: float = 1.0
) -> list[Tensor]:
    """`shape[0]` standard normal tensors of shape `shape[1:]`, times `scale`."""
    generator = torch.Generator().manual_seed(seed)
    values = scale * torch.randn(shape, generator=generator)
    return [x.requires_grad_(training) for x in values.to(device, getattr(torch, dtype)).unbind()]


def _projections(method: str) -> list[str]:
    """Names of the learned (projected_length, N) matrices that the method takes as arguments."""
    parameters = inspect.signature(find(method).function).parameters
    return [name for name in parameters if name.endswith("_projection")]
