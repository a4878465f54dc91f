"""The table of methods, and attention by name."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.attention import auto, checks
from longspan.attention.linformer import LinformerAttention, linformer
from longspan.attention.linformer import why_not_fused as why_not_linformer
from longspan.attention.module import Attention
from longspan.attention.nystrom import NystromAttention, nystrom
from longspan.attention.nystrom import why_not_fused as why_not_nystrom
from longspan.attention.reformer import ReformerAttention, reformer
from longspan.attention.softmax import SoftmaxAttention, softmax
from longspan.attention.strided import StridedAttention, strided
from longspan.attention.window import WindowAttention, window
from longspan.attention.window import why_not_fused as why_not_window
from longspan.attention.yoso import (
    YosoAttention,
    YosoExpectationAttention,
    yoso,
    yoso_expectation,
)
from longspan.attention.yoso import why_expectation_not_fused as why_not_expectation
from longspan.attention.yoso import why_not_fused as why_not_yoso


@dataclass(frozen=True)
class Method:
    """A row of METHODS: what a method is, costs and cannot do."""

    function: Callable[..., Tensor]
    module: type[Attention]
    cost: str
    paper: str
    summary: str
    no_causal: str
    why_not_fused: Callable[[torch.device], list[str]] | None = None


_BOTH_WAYS = "it is written for both directions"

METHODS: dict[str, Method] = {
    "softmax": Method(
        softmax,
        SoftmaxAttention,
        cost="N²·D",
        paper="1706.03762",
        summary="Exact attention through torch's fused kernels.",
        no_causal=f"{_BOTH_WAYS}; torch's scaled_dot_product_attention has is_causal",
    ),
    "window": Method(
        window,
        WindowAttention,
        cost="N·window·D",
        paper="2004.05150",
        summary="Each token sees its neighbours (Longformer).",
        no_causal=_BOTH_WAYS,
        why_not_fused=why_not_window,
    ),
    "strided": Method(
        strided,
        StridedAttention,
        cost="N·√N·D",
        paper="1904.10509",
        summary="Neighbours and every stride-th token (Sparse Transformer).",
        no_causal=_BOTH_WAYS,
    ),
    "reformer": Method(
        reformer,
        ReformerAttention,
        cost="N·(log N + num_hashes·bucket_size·D)",
        paper="2001.04451",
        summary="Tokens sorted by a hash see those near in that order (Reformer).",
        no_causal="its runs follow the order of hashes, not of tokens",
    ),
    "yoso": Method(
        yoso,
        YosoAttention,
        cost="N·num_hashes·D",
        paper="2111.09714",
        summary="Attention sampled by hash collisions, through bucket tables (YOSO).",
        no_causal="a bucket's sum holds all keys, later ones too",
        why_not_fused=why_not_yoso,
    ),
    "yoso_expectation": Method(
        yoso_expectation,
        YosoExpectationAttention,
        cost="N²·D",
        paper="2111.09714",
        summary="The limit of YOSO over many hashes, exact (YOSO-E).",
        no_causal=_BOTH_WAYS,
        why_not_fused=why_not_expectation,
    ),
    "nystrom": Method(
        nystrom,
        NystromAttention,
        cost="N·num_landmarks·D",
        paper="2102.03902",
        summary="Attention through landmarks, means of segments (Nyströmformer).",
        no_causal="landmarks are means over segments, so they mix later tokens into earlier ones",
        why_not_fused=why_not_nystrom,
    ),
    "linformer": Method(
        linformer,
        LinformerAttention,
        cost="N·projected_length·D",
        paper="2006.04768",
        summary="Keys and values projected to a fixed length (Linformer).",
        no_causal="its projections mix all tokens of the sequence, later ones too",
        why_not_fused=why_not_linformer,
    ),
}


def find(method: str) -> Method:
    """The row of a method; an unknown name is an error that names the nearest."""
    checks.choice("method", method, METHODS)
    return METHODS[method]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: str = "yoso",
    *,
    key_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attend with any method by name.

    Args:
        q: queries (B, H, Nq, D).
        k: keys (B, H, Nk, D).
        v: values (B, H, Nk, Dv).
        method: a key of METHODS, or "auto".
        key_mask: boolean (B, Nk), true = attend.
        options: of that method's function.

    `method="auto"` is exact attention (softmax), at any length, unless the option `approximate`
    names a method that may stand in for it: then that one is used from `exact_below` keys on,
    with the other options, which are its own. By default `exact_below` is where it was measured
    to become faster (`longspan.attention.auto.CROSSOVERS`); `longspan advise` says where it does on
    this machine.

    Returns:
        (B, H, Nq, Dv) in the dtype of v.
    """
    if method == "auto":
        checks.qkv(q, k, v)
        method, options = _auto(q, k, v, **options)
    row = find(method)
    if options.pop("is_causal", False):
        refuse_causal(method)
    checks.options(row.function, options, owner=method)
    needed = ("key_projection", "value_projection") if method == "linformer" else ()
    if any(name not in options for name in needed):
        raise TypeError(
            "key_projection and value_projection must be given for linformer, got "
            f"{', '.join(options) or 'neither'}; longspan.LinformerAttention has its own, and "
            "learns them"
        )
    return row.function(q, k, v, key_mask=key_mask, **options)


def _auto(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    approximate: str | None = None,
    exact_below: int | None = None,
    **options: Any,
) -> tuple[str, dict[str, Any]]:
    """The method to use, and the options it gets."""
    if approximate is None:
        if exact_below is not None:
            raise ValueError(
                f"approximate must name a method where exact_below is given, got {approximate!r}"
            )
        return auto.EXACT, options
    checks.choice("approximate", approximate, [m for m in METHODS if m != auto.EXACT])
    if exact_below is not None:
        checks.integer("exact_below", exact_below, 0)
    causal = {"is_causal": options.pop("is_causal")} if "is_causal" in options else {}
    checks.options(METHODS[approximate].function, options, owner=approximate)
    method = auto.choose(q, k, v, approximate, exact_below)
    if method == auto.EXACT:  # what both take is meant for both: scale
        shared = inspect.signature(METHODS[method].function).parameters
        options = {name: value for name, value in options.items() if name in shared}
    return method, options | causal


def refuse_causal(method: str) -> None:
    """Raise the reason why `method` cannot be causal."""
    raise NotImplementedError(
        f"is_causal cannot be honoured by {method}: {METHODS[method].no_causal}"
    )
