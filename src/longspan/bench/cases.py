"""One case is one call of one method at one shape, forward alone or with its backward pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import longspan
from longspan.attention import checks
from longspan.attention.methods import find
from longspan.bench.baselines import BASELINES

MODES = ("forward", "forward+backward")
PROJECTED_LENGTH = 256
INPUTS = {
    "spread": "queries and keys are Gaussian",
    "clustered": "queries and keys are one of 32 Gaussian centres a head, and 0.35 of noise",
    "one-key": "queries are Gaussian, all keys of a head are the same",
    "one-vector": "all queries and keys of a head are the same",
    "padded": "queries and keys are Gaussian, and a batch is padded: a quarter of it is masked",
}
CENTRES, NOISE = 32, 0.35


@dataclass(frozen=True)
class Case:
    """What is timed: method, shape (B, H, N, D), dtype, device, the method's own options, inputs.

    `method` is a key of METHODS or BASELINES.
    `inputs` is a key of INPUTS: how much queries and keys resemble each other, which decides how
    full the buckets of a method that hashes them are.
    """

    method: str
    length: int
    heads: int = 8
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    inputs: str = "spread"

    def build(self, mode: str, seed: int = 0) -> Callable[[], object]:
        """A call without arguments that runs one pass on inputs drawn once from `seed`, on device.

        `mode` is "forward" (no graph is kept) or "forward+backward" (gradients of queries, keys,
        values and, for methods that have them, of learned projections). Cases of one shape that
        are built in a row share their queries, keys and values. The gradient of the output is made
        here, not in the call.
        """
        checks.choice("inputs", self.inputs, INPUTS)
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        training = mode == "forward+backward"
        place = (self.dtype, self.device, training, seed)
        shape = (self.batch, self.heads, self.length, self.head_dim)
        q, k, v = draw_inputs((3, *shape), *place, inputs=self.inputs)
        inputs = [q, k, v]
        options = dict(self.options)
        if self.inputs == "padded":
            options["key_mask"] = padding(self.batch, self.length, self.device)
        attend = BASELINES.get(self.method) or partial(longspan.attention, method=self.method)
        projections = _projections(self.method)
        if projections:
            projected_length = options.pop("projected_length", PROJECTED_LENGTH)
            sizes = (len(projections), projected_length, self.length)
            matrices = draw_inputs(sizes, *place, scale=self.length**-0.5)
            options.update(zip(projections, matrices, strict=True))
            inputs.extend(matrices)

        def forward() -> Tensor:
            with torch.inference_mode():
                return attend(q, k, v, **options)

        if not training:
            return forward
        frozen = self.method in BASELINES  # of which some leave their projections alone
        gradient = torch.ones_like(v)  # of the output, which has the shape of v here

        def forward_backward() -> object:
            output = attend(q, k, v, **options)
            return torch.autograd.grad(output, inputs, gradient, allow_unused=frozen)

        return forward_backward


def fastest_exact(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with torch's exact kernels in the order of their speed on a GPU, cuDNN's first.

    torch may choose flash attention, which takes up to 1.7 times as long on an H200.
    """
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]

    def run() -> Any:
        with sdpa_kernel(order, set_priority=True):
            return call()

    return run


def padding(batch: int, length: int, device: str) -> Tensor:
    """The mask (B, N) of sequences from half to all of `length` long, three quarters on average."""
    place = torch.arange(length, device=device)
    share = 0.5 + 0.5 * (torch.arange(batch, device=device) + 0.5) / batch
    return place < (share * length)[:, None]


# At long lengths the inputs fill the memory, so methods share them; old ones are let go.
@functools.lru_cache(maxsize=2)
def draw_inputs(
    shape: tuple[int, ...],
    dtype: str,
    device: str,
    training: bool,
    seed: int,
    scale: float = 1.0,
    inputs: str = "spread",
) -> list[Tensor]:
    """`shape[0]` tensors of shape `shape[1:]`: standard normal times `scale`, or as `inputs` says.

    Drawn on the device: a GPU would wait seconds for the CPU's numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)
    values = torch.randn(shape, generator=generator, device=device).mul_(scale)
    if inputs == "clustered":
        *batch, length, channels = shape[1:]
        centres = torch.randn(*batch, CENTRES, channels, generator=generator, device=device)
        for x in values[:2]:  # queries, keys
            which = torch.randint(CENTRES, (*batch, length, 1), generator=generator, device=device)
            x.mul_(NOISE).add_(centres.gather(-2, which.expand_as(x)))
    elif inputs in ("one-key", "one-vector"):
        values[1] = values[1, ..., :1, :].clone()
        if inputs == "one-vector":
            values[0] = values[1]
    return [x.requires_grad_(training) for x in values.to(getattr(torch, dtype)).unbind()]


def _projections(method: str) -> list[str]:
    """Names of the learned (projected_length, N) matrices that the method takes as arguments."""
    function = BASELINES[method] if method in BASELINES else find(method).function
    parameters = inspect.signature(function).parameters
    return [name for name in parameters if name.endswith("_projection")]
