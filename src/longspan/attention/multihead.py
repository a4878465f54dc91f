"""A drop-in for torch.nn.MultiheadAttention with any method inside."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.attention.methods import find, refuse_causal


class MultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention with the parameters and forward arguments of torch's, any method inside.

    Args:
        embed_dim: channels of the model, split over the heads.
        num_heads: heads H.
        method: a key of METHODS.
        conv_kernel: odd length of a depth-wise convolution of the values, added to each head.
        bias: of the input and output projections.
        kdim: channels of `key`, `embed_dim` by default.
        vdim: channels of `value`, `embed_dim` by default.
        batch_first: (B, N, E) instead of torch's default (N, B, E).
        device: of the parameters.
        dtype: of the parameters.
        options: of the method's module.

    State dicts of `torch.nn.MultiheadAttention` load into it; what a method learns besides
    (convolution, Linformer's projections) lives under `attention.`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        method: str = "yoso",
        conv_kernel: int | None = None,
        *,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        row = find(method)
        if options.pop("dropout", 0):
            raise NotImplementedError(
                "dropout of attention weights cannot be honoured: linear methods have no weights "
                "to drop; apply dropout to the output"
            )
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
            )
        super().__init__(
            embed_dim,
            num_heads,
            bias=bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self.method = method
        self.attention: Any = row.module(num_heads, conv_kernel=conv_kernel, **options)
        self.attention.to(device=device, dtype=dtype)
        # torch.nn.TransformerEncoderLayer has an inference path that reads the projections and
        # computes softmax itself; this is how a layer tells it to call forward() instead.
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        """Start the projections afresh; torch asks the flag above how they are stored."""
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend, as torch's module does: (output, None), for no weights exist to be returned.

        Args:
            query: (Nq, B, E), (B, Nq, E) with `batch_first`, or (Nq, E).
            key: (Nk, B, kdim), likewise.
            value: (Nk, B, vdim), likewise.
            key_padding_mask: (B, Nk), true (or −∞) = ignore the key: torch's meaning.
            need_weights: must be false.
            attn_mask: must be None.
            average_attn_weights: without effect.
            is_causal: must be false.
        """
        if is_causal:
            refuse_causal(self.method)
        if need_weights:
            raise NotImplementedError(
                f"need_weights cannot be honoured by {self.method}: the N × N weights never exist"
            )
        if attn_mask is not None:
            raise NotImplementedError(
                f"attn_mask cannot be honoured by {self.method}: it is an N × N mask; "
                "key_padding_mask hides keys"
            )
        batched = self._check(query, key, value)
        if not batched:
            query, key, value = (x[None] for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        mask = _visible(key_padding_mask, batched, key)
        linears = self._linears()
        if self.attention.project_first:
            q = self._heads(F.linear(query, *linears[0]))
            y = self.attention.attend_inputs(q, key, value, *linears[1:], mask)
        else:
            inputs = zip((query, key, value), linears, strict=True)
            q, k, v = (self._heads(F.linear(x, *linear)) for x, linear in inputs)
            y = self.attention(q, k, v, key_mask=mask)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if not batched:
            return y[0], None
        return (y if self.batch_first else y.transpose(0, 1)), None

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Check shapes; return whether there is a batch dimension."""
        sizes = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, size), x in zip(sizes.items(), (query, key, value), strict=True):
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != size:
                form = f"(N, B, {size}), (B, N, {size}) with batch_first, or (N, {size})"
                raise ValueError(f"{name} must have shape {form}, got {tuple(x.shape)}")
        batched = query.dim() == 3
        batch = 0 if self.batch_first else 1
        if batched and key.shape[batch] != query.shape[batch]:
            raise ValueError(
                f"key must have the batch size of query ({query.shape[batch]}), got "
                f"{key.shape[batch]}"
            )
        if value.shape[:-1] != key.shape[:-1]:
            raise ValueError(
                f"value must have the batch size and length of key {tuple(key.shape[:-1])}, got "
                f"{tuple(value.shape[:-1])}"
            )
        return batched

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, E) → (B, H, N, D)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def _linears(self) -> list[tuple[Tensor, Tensor | None]]:
        """Matrix and bias of query, key and value, as torch stores them: packed, or one each."""
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return list(zip(weights, biases, strict=True))


def _visible(key_padding_mask: Tensor | None, batched: bool, key: Tensor) -> Tensor | None:
    """torch's padding mask (true or −∞ = ignore) as a key mask (true = attend)."""
    if key_padding_mask is None:
        return None
    if not isinstance(key_padding_mask, Tensor):
        given = type(key_padding_mask).__name__
        raise TypeError(f"key_padding_mask must be a torch.Tensor or None, got {given}")
    mask = key_padding_mask if batched else key_padding_mask[None]
    if mask.shape != key.shape[:2]:
        expected = tuple(key.shape[:2] if batched else key.shape[1:2])
        raise ValueError(
            f"key_padding_mask must have the shape {expected}, got {tuple(key_padding_mask.shape)}"
        )
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        raise TypeError(f"key_padding_mask must be boolean or floating point, got {mask.dtype}")
    # Encoder layers hand boolean masks on as 0 and −∞; a finite bias has no meaning here.
    visible = mask == 0
    torch._assert_async(
        (visible | (mask == -torch.inf)).all(),
        "key_padding_mask must hold 0 or -inf where it is float",
    )
    return visible
