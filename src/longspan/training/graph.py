"""Steps as CUDA graphs: forward and backward recorded once, then replayed with one launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 3  # steps that compile, choose and allocate what a recording must find ready
Batch = dict[str, Tensor]


class StepGraph:
    """Replays `step(batch)`, which computes a loss and gradients, once it has been recorded.

    There is a recording for every shape of batch. Random numbers are drawn afresh in every replay,
    as long as they come from torch's generator on the device. Gradients lie in memory of the
    recording and are given back to the parameters after each replay.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.seen: Counter[Any] = Counter()
        self.recorded: dict[Any, tuple[torch.cuda.CUDAGraph, Batch, Tensor, list[Any]]] = {}

    def __call__(self, step: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """The loss of a batch; gradients are left in the parameters."""
        key = tuple((name, x.shape, x.dtype) for name, x in sorted(batch.items()))
        if key not in self.recorded:
            self.seen[key] += 1
            if self.seen[key] <= WARM_UP:
                return self._aside(step, batch)
            self.recorded[key] = self._record(step, batch)
        graph, inputs, loss, gradients = self.recorded[key]
        for name, x in batch.items():
            inputs[name].copy_(x)
        graph.replay()
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        return loss

    def _aside(self, step: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """Run on another stream, as recordings do: autograd remembers streams."""
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            loss = step(batch)
        current.wait_stream(stream)
        return loss

    def _record(
        self, step: Callable[[Batch], Tensor], batch: Batch
    ) -> tuple[torch.cuda.CUDAGraph, Batch, Tensor, list[Any]]:
        inputs = {name: x.clone() for name, x in batch.items()}
        for parameter in self.parameters:
            parameter.grad = None  # so that gradients are written, not added
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step(dict(inputs))
        return graph, inputs, loss, [parameter.grad for parameter in self.parameters]
