"""The public function and module of Linformer: check, choose, call."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from longspan.attention import checks, dispatch
from longspan.attention.base import exact, hide, own_precision
from longspan.attention.linformer import kernels, reference
from longspan.attention.linformer.projection import KINDS, SequenceProjection
from longspan.attention.module import Attention

SHARINGS = ("none", "headwise", "key-value", "layerwise")

Linear = tuple[Tensor, Tensor | None]  # a matrix (out, in) and a bias


def why_not_fused(device: torch.device) -> list[str]:
    """Why `impl="fused"` cannot run on a device; empty where it can."""
    return kernels.why_not(device)


@own_precision
def linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_projection: Tensor,
    value_projection: Tensor,
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """softmax(scale · q (E k)ᵀ) (F v): attention over projected keys and values, O(N k D).

    Masked keys are zeroed before the projection. The projections know places: permuting keys
    and values together changes the result.

    Args:
        q: queries (B, H, Nq, D).
        k: keys (B, H, Nk, D).
        v: values (B, H, Nk, Dv).
        key_projection: E, (projected_length, Nk) or (H, projected_length, Nk).
        value_projection: F, likewise.
        key_mask: boolean (B, Nk), true = attend.
        scale: factor of the scores, 1/√D by default.
        impl: "auto", "fused" or "reference".

    Returns:
        (B, H, Nq, Dv) in the dtype of v.
    """
    checks.qkv(q, k, v)
    checks.key_mask(key_mask, k)
    checks.scale(scale)
    heads, keys = k.shape[1], k.shape[2]
    named = ("key_projection", key_projection), ("value_projection", value_projection)
    for name, x in named:
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q ({q.device}), got {x.device}")
        if x.dim() not in (2, 3) or x.shape[-1] != keys or (x.dim() == 3 and x.shape[0] != heads):
            raise ValueError(
                f"{name} must have shape (k, {keys}) or ({heads}, k, {keys}), got {tuple(x.shape)}"
            )
    if key_projection.shape[-2] != value_projection.shape[-2]:
        raise ValueError(
            "value_projection must project to the length of key_projection "
            f"({key_projection.shape[-2]}), got {value_projection.shape[-2]}"
        )
    reasons = why_not_fused(q.device) + kernels.why_not_these(q, v)
    run = dispatch.select(
        impl, reference=reference.linformer, fused=kernels.linformer, reasons=reasons
    )
    return run(q, k, v, key_projection, value_projection, key_mask, scale)


class LinformerAttention(Attention):
    """Linformer with learned projections.

    Args:
        num_heads: heads H of the tensors to come.
        max_length: tokens the projections are made for. Shorter inputs use their first columns;
            longer ones stretch them (see `SequenceProjection`).
        projected_length: k, the length that keys and values are projected to.
        sharing: "none" (E and F for each head), "headwise" (one E and one F), "key-value" (E = F)
            or "layerwise" (one E = F for all layers: give the same `projection` to each).
        projection: "linear", "convolution" or "mean-pool", or a `SequenceProjection` to share.
        scale: factor of the scores, 1/√D by default.
        project_first: in `MultiheadAttention`, project the inputs along the sequence before W_K and
            W_V, which then see k rows in place of N: E X W_K + (E 1) bᵀ is E (X W_K + 1 bᵀ). Linear
            projections that heads share, and no conv_kernel.
        impl: "auto", "fused" or "reference".
        conv_kernel: as in every module, see `Attention`.
    """

    function = staticmethod(linformer)

    def __init__(
        self,
        num_heads: int,
        *,
        max_length: int,
        projected_length: int = 256,
        sharing: str = "headwise",
        projection: str | SequenceProjection = "linear",
        scale: float | None = None,
        project_first: bool = False,
        impl: str = "auto",
        conv_kernel: int | None = None,
    ) -> None:
        super().__init__(num_heads, conv_kernel=conv_kernel, scale=scale, impl=impl)
        checks.choice("sharing", sharing, SHARINGS)
        kind = projection.kind if isinstance(projection, SequenceProjection) else projection
        if project_first and (sharing == "none" or kind != "linear" or conv_kernel is not None):
            raise ValueError(
                "project_first must go with linear projections that heads share, no conv_kernel, "
                f"got sharing={sharing!r}, projection={kind!r} and conv_kernel={conv_kernel}"
            )
        self.project_first = project_first
        if isinstance(projection, SequenceProjection) != (sharing == "layerwise"):
            raise ValueError(
                "projection must be a SequenceProjection that all layers share with "
                f"sharing='layerwise', and a name among {', '.join(KINDS)} otherwise, "
                f"got sharing={sharing!r} and projection={projection!r}"
            )
        if isinstance(projection, SequenceProjection):
            self.key_projection = self.value_projection = projection
            return

        def make() -> SequenceProjection:
            heads = num_heads if sharing == "none" else None
            return SequenceProjection(
                max_length, projected_length, kind=projection, num_heads=heads
            )

        self.key_projection = make()
        self.value_projection = self.key_projection if sharing == "key-value" else make()

    def attend_inputs(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        key_linear: Linear,
        value_linear: Linear,
        key_mask: Tensor | None,
    ) -> Tensor:
        """Attention of q (B, H, Nq, D) over inputs (B, Nk, C), projected before W_K and W_V."""
        self._refuse_fused("project_first=True")
        short: list[Tensor] = []
        for x, (weight, bias), projection in (
            (key, key_linear, self.key_projection),
            (value, value_linear, self.value_projection),
        ):
            e = projection.matrix(x.shape[1]).to(x.dtype)  # (k, Nk)
            if key_mask is not None:
                x = hide(x[:, None], key_mask)[:, 0]
            y = linear(e @ x, weight)
            if bias is not None:
                ones = e.sum(-1) if key_mask is None else key_mask.to(e.dtype) @ e.mT  # (B, k)
                y = y + ones[..., None] * bias
            short.append(y.unflatten(2, (self.num_heads, -1)).transpose(1, 2))
        return exact(q, short[0], short[1], scale=self.options["scale"])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Attention over the projected keys and values."""
        if self.key_projection.kind == "linear":
            e, f = (p.matrix(k.shape[2]) for p in (self.key_projection, self.value_projection))
            return linformer(q, k, v, e, f, key_mask=key_mask, **self.options)
        short_k, visible = self.key_projection(k, key_mask)
        short_v, _ = self.value_projection(v, key_mask)
        self._refuse_fused(f"projection={self.key_projection.kind!r}")
        visible = visible[:, None, None, :]
        return own_precision(exact)(q, short_k, short_v, visible, self.options["scale"])

    def _refuse_fused(self, setting: str) -> None:
        reasons = [f"linformer has no fused kernel for {setting}"]
        dispatch.select(self.options["impl"], reference=exact, reasons=reasons)
