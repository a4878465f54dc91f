"""The public function of Nyström attention: check, choose, call."""

import torch
from torch import Tensor

from longspan.attention import checks, dispatch
from longspan.attention.base import own_precision
from longspan.attention.module import Attention
from longspan.attention.nystrom import kernels, reference

INITS = ("exact", "original")


def why_not_fused(device: torch.device) -> list[str]:
    """Why `impl="fused"` cannot run on a device; empty where it can."""
    return kernels.why_not(device)


@own_precision
def nystrom(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    num_landmarks: int = 64,
    num_iterations: int = 6,
    init: str = "exact",
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """softmax(q k̃ᵀ) · softmax(q̃ k̃ᵀ)⁺ · softmax(q̃ kᵀ) v with landmarks q̃, k̃: O(N m D).

    Landmarks are means over `num_landmarks` segments of each sequence's own valid tokens. A
    sequence of no more valid keys than landmarks gets exact attention. Where Nq = Nk the two are
    taken for one sequence, and masked places do not enter the landmarks of the queries either.

    Args:
        q: queries (B, H, Nq, D).
        k: keys (B, H, Nk, D).
        v: values (B, H, Nk, Dv).
        key_mask: boolean (B, Nk), true = attend.
        num_landmarks: m, segments of queries and of keys.
        num_iterations: steps of the iterated pseudo-inverse. Six do not converge, they filter
            small singular values: weights trained with six want six.
        init: "exact" starts the iteration from each head's own norm; "original" from the largest
            in the batch, which makes a sample depend on its neighbours: for checkpoints trained so.
        scale: factor of the scores, 1/√D by default.
        impl: "auto", "fused" or "reference".

    Returns:
        (B, H, Nq, Dv) in the dtype of v.
    """
    checks.qkv(q, k, v)
    checks.key_mask(key_mask, k)
    checks.integer("num_landmarks", num_landmarks, 1)
    checks.integer("num_iterations", num_iterations, 1)
    checks.choice("init", init, INITS)
    checks.scale(scale)
    reasons = why_not_fused(q.device) + kernels.why_not_these(q, v, num_landmarks)
    run = dispatch.select(impl, reference=reference.nystrom, fused=kernels.nystrom, reasons=reasons)
    return run(q, k, v, key_mask, num_landmarks, num_iterations, init, scale)


class NystromAttention(Attention):
    """`nystrom` as a module; `conv_kernel` is the paper's residual convolution."""

    function = staticmethod(nystrom)
