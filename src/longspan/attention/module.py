"""Attention as a module: the options of a method, its learned parts, its state."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from longspan.attention import checks
from longspan.attention.convolution import add_convolution

EVAL_SEED = 0


class Attention(nn.Module):
    """A method with its options, on (B, H, N, D) tensors.

    Args:
        num_heads: heads H of the tensors to come.
        conv_kernel: odd length of a depth-wise convolution of the values along the sequence,
            one filter a head, added to the output (Nyströmformer's and YOSO-C's residual).
        options: of the method's function.
    """

    function: ClassVar[Callable[..., Tensor]]
    project_first = False  # whether inputs are shortened before they become keys and values

    def __init__(self, num_heads: int, *, conv_kernel: int | None = None, **options: Any) -> None:
        super().__init__()
        checks.integer("num_heads", num_heads, 1)
        own = inspect.signature(type(self)).parameters.values()
        also = [p.name for p in own if p.kind is p.KEYWORD_ONLY]
        checks.options(self.function, options, owner=type(self).__name__, also=also)
        self.num_heads, self.options = num_heads, options
        self.conv: nn.Conv2d | None = None
        if conv_kernel is not None:
            checks.integer("conv_kernel", conv_kernel, 1)
            if conv_kernel % 2 == 0:
                raise ValueError(f"conv_kernel must be odd, got {conv_kernel}")
            # (H, 1, kernel, 1): the layout of published checkpoints.
            self.conv = nn.Conv2d(
                num_heads, num_heads, (conv_kernel, 1), groups=num_heads, bias=False
            )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Attend: q (B, H, Nq, D), k (B, H, Nk, D), v (B, H, Nk, Dv) → (B, H, Nq, Dv)."""
        checks.qkv(q, k, v)
        checks.key_mask(key_mask, k)
        if q.shape[1] != self.num_heads:
            raise ValueError(f"q must have num_heads = {self.num_heads} heads, got {q.shape[1]}")
        if self.conv is not None and q.shape[2] != k.shape[2]:
            raise ValueError(
                "q must be as long as k with conv_kernel, which adds each value to its own place, "
                f"got {q.shape[2]} and {k.shape[2]}"
            )
        y = self.attend(q, k, v, key_mask)
        if self.conv is None:
            return y
        return add_convolution(y, v, self.conv.weight, key_mask, self.options.get("impl", "auto"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """The method itself, without the convolution."""
        return self.function(q, k, v, key_mask=key_mask, **self.options)

    def extra_repr(self) -> str:
        """Show heads and options in the printed module."""
        return ", ".join(
            [f"num_heads={self.num_heads}", *(f"{k}={v!r}" for k, v in self.options.items())]
        )


class SeededAttention(Attention):
    """A sampling method: draws afresh in training, one fixed seed in eval unless given one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """The method, with the seed of the mode the module is in."""
        options = dict(self.options)
        if options.get("seed") is None and not self.training:
            options["seed"] = EVAL_SEED
        return self.function(q, k, v, key_mask=key_mask, **options)
