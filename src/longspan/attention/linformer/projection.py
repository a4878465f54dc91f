"""Projections along the sequence: learned matrices, convolutions, means."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.attention import checks
from longspan.attention.base import hide, segment_means

KINDS = ("linear", "convolution", "mean-pool")


class SequenceProjection(nn.Module):
    """Shortens (B, H, N, D) along N.

    Args:
        max_length: N it is made for.
        projected_length: k.
        kind: "linear", a learned (k, max_length) matrix; "convolution", a learned filter as long
            as its stride ⌈max_length/k⌉; "mean-pool", means over k segments of the valid tokens.
        num_heads: heads with a matrix or filter each; None shares one among them.

    Other lengths than `max_length`: a matrix is sliced for shorter inputs and stretched by
    linear interpolation for longer ones, by their length with padding, which therefore changes
    the result; a filter keeps its stride, so the projected length is in proportion; means work
    at any length.
    """

    def __init__(
        self,
        max_length: int,
        projected_length: int,
        *,
        kind: str = "linear",
        num_heads: int | None = None,
    ) -> None:
        super().__init__()
        checks.integer("max_length", max_length, 1)
        checks.integer("projected_length", projected_length, 1)
        checks.choice("projection", kind, KINDS)
        self.max_length, self.projected_length, self.kind = max_length, projected_length, kind
        self.stride = -(-max_length // projected_length)
        heads = 1 if num_heads is None else num_heads
        self.weight: nn.Parameter | None = None
        if kind == "linear":
            self.weight = nn.Parameter(torch.empty(heads, projected_length, max_length))
        elif kind == "convolution":
            self.weight = nn.Parameter(torch.empty(heads, self.stride))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start matrices at N(0, 1/max_length), which keeps the scale; filters at the mean."""
        if self.kind == "linear":
            nn.init.normal_(self.weight, std=self.max_length**-0.5)  # type: ignore[arg-type]
        elif self.kind == "convolution":
            nn.init.constant_(self.weight, 1 / self.stride)  # type: ignore[arg-type]

    def extend(self, length: int) -> None:
        """Make it for `length` tokens from now on: what was learned is stretched, its sum kept."""
        stride = -(-length // self.projected_length)
        if self.weight is not None:
            old, new = (self.max_length, length) if self.kind == "linear" else (self.stride, stride)
            rows = self.weight.view(1, -1, old)
            stretched = F.interpolate(rows, size=new, mode="linear") * (old / new)
            weight = stretched.view(*self.weight.shape[:-1], new)
            self.weight = nn.Parameter(weight.detach(), self.weight.requires_grad)
        self.max_length, self.stride = length, stride

    def matrix(self, tokens: int) -> Tensor:
        """The (k, N) or (H, k, N) matrix of a linear projection for N tokens."""
        assert self.weight is not None
        weight: Tensor = self.weight
        if tokens > self.max_length:
            # Stretched by N/max_length, each column weighs that much less.
            weight = F.interpolate(weight, size=tokens, mode="linear") * (self.max_length / tokens)
        weight = weight[..., :tokens]
        return weight[0] if weight.shape[0] == 1 else weight

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Project x (B, H, N, D): (B, H, k, D), and which of the k hold anything (B, k)."""
        batch, _, tokens, _ = x.shape
        x = hide(x, key_mask)
        if key_mask is None:
            key_mask = x.new_ones(batch, tokens, dtype=torch.bool)
        if self.kind == "mean-pool":
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            means, sizes = segment_means(wide, key_mask, self.projected_length)
            return means.to(x.dtype), sizes > 0
        if self.kind == "linear":
            y = self.matrix(tokens).to(x.dtype) @ x
            return y, key_mask.new_ones(batch, y.shape[2])
        assert self.weight is not None
        missing = -tokens % self.stride
        parts = F.pad(x, (0, 0, 0, missing)).unflatten(2, (-1, self.stride))
        y = (parts * self.weight.to(x.dtype)[:, None, :, None]).sum(3)
        return y, F.pad(key_mask, (0, missing)).unflatten(1, (-1, self.stride)).any(-1)

    def extra_repr(self) -> str:
        """Show kind and sizes in the printed module."""
        return (
            f"{self.kind}, max_length={self.max_length}, projected_length={self.projected_length}"
        )
