"""The public functions of YOSO: check, choose, call."""

from typing import Any

import torch
from torch import Tensor

from longspan.attention import checks, dispatch
from longspan.attention.base import own_precision
from longspan.attention.module import Attention, SeededAttention
from longspan.attention.random import Seed, draw_seed
from longspan.attention.yoso import cpu, expectation, kernels, reference

HASHINGS = ("gaussian", "hadamard")
GRADIENTS = ("surrogate", "true")
MAX_HASH_BITS = 16
# Keys under which modules compute a fused `yoso_expectation`: about where sampling gets faster.
EXACT_BELOW = {torch.bfloat16: 2048, torch.float16: 1024, torch.float32: 1024}
EXACT_OPTIONS = ("hash_bits", "gradient", "normalize", "impl")


def why_not_fused(device: torch.device) -> list[str]:
    """Why `impl="fused"` cannot run on a device; empty where it can."""
    return (cpu if device.type == "cpu" else kernels).why_not(device)


def why_expectation_not_fused(device: torch.device) -> list[str]:
    """Why `yoso_expectation(..., impl="fused")` cannot run on a device; empty where it can."""
    return expectation.why_not(device)


@own_precision
def yoso(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    num_hashes: int = 32,
    hash_bits: int = 8,
    hashing: str = "gaussian",
    gradient: str = "surrogate",
    backward_hashes: int | None = None,
    normalize: bool = True,
    seed: Seed | None = None,
    impl: str = "auto",
) -> Tensor:
    """Sample attention by hashing: unit(1/m Σ_h Σ_j [code_h(q_i) = code_h(k_j)] v_j), in O(N m D).

    A code is the signs of `hash_bits` random projections; two unit vectors at angle θ share one
    with probability (1 − θ/π)^hash_bits, so the sum estimates `yoso_expectation` without bias.

    Args:
        q: queries (B, H, Nq, D); their length does not matter, only their direction.
        k: keys (B, H, Nk, D), likewise.
        v: values (B, H, Nk, Dv).
        key_mask: boolean (B, Nk), true = attend.
        num_hashes: m, the samples of every pair; the error falls as 1/√m.
        hash_bits: τ, 1 to 16: the sharpness of the attention.
        hashing: "gaussian" hyperplanes, or "hadamard": rows of random Hadamard products, each bit
            of a code from a different product.
        gradient: of the collision probability p^τ with respect to the cosine: "surrogate" is the
            paper's lower bound (τ/2) p^τ, "true" the derivative, both on the sampled pairs. Its
            reference looks at every pair: time N², memory N. The kernels look at the pairs of a
            bucket, and draw from a crowded one: 16 tokens for each that meets it on a GPU, 128 for
            each block of 64 on a CPU. Linear, and right on average.
        backward_hashes: how many of the hashes dq and dk are sampled with; None for all. Fewer are
            faster, and for a given gradient of the output still right on average: hashes are
            independent, so that the first ones are as random a choice as any. dv takes all.
        normalize: scale each output row to length one.
        seed: of the projections, drawn per head and shared over the batch; the same seed gives the
            same hashes everywhere. None draws one from torch's default generator.
            The same seed and inputs give the same bits, but for dq and dk of 16-bit inputs on a
            GPU, which do under `torch.use_deterministic_algorithms(True)`, and take longer.
        impl: "auto", "fused" or "reference".

    Returns:
        (B, H, Nq, Dv) in the dtype of v.
    """
    _check(q, k, v, key_mask, hash_bits, gradient)
    checks.integer("num_hashes", num_hashes, 1)
    checks.choice("hashing", hashing, HASHINGS)
    checks.boolean("normalize", normalize)
    if backward_hashes is None:
        backward_hashes = num_hashes
    checks.integer("backward_hashes", backward_hashes, 1, num_hashes)
    checks.seed(seed)
    fused = cpu if q.device.type == "cpu" else kernels
    reasons = fused.why_not(q.device) + fused.why_not_these(q, v)
    run = dispatch.select(impl, reference=reference.yoso, fused=fused.yoso, reasons=reasons)
    seed = draw_seed(q.device) if seed is None else seed
    sampling = num_hashes, hash_bits, hashing, gradient, backward_hashes
    return run(q, k, v, key_mask, *sampling, normalize, seed)


@own_precision
def yoso_expectation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_mask: Tensor | None = None,
    hash_bits: int = 8,
    gradient: str = "surrogate",
    normalize: bool = True,
    impl: str = "auto",
) -> Tensor:
    """What `yoso` tends to over many hashes: unit(Σ_j (1 − angle(q_i, k_j)/π)^τ v_j).

    Exact, without variance; time N², memory N.

    Args:
        q: queries (B, H, Nq, D).
        k: keys (B, H, Nk, D).
        v: values (B, H, Nk, Dv).
        key_mask: boolean (B, Nk), true = attend.
        hash_bits: τ, 1 to 16: the sharpness of the attention.
        gradient: "surrogate" or "true", as in `yoso`.
        normalize: scale each output row to length one.
        impl: "auto", "fused" or "reference".

    Returns:
        (B, H, Nq, Dv) in the dtype of v.
    """
    _check(q, k, v, key_mask, hash_bits, gradient)
    reasons = why_expectation_not_fused(q.device) + expectation.why_not_these(q, v)
    run = dispatch.select(
        impl,
        reference=reference.yoso_expectation,
        fused=expectation.yoso_expectation,
        reasons=reasons,
    )
    return run(q, k, v, key_mask, hash_bits, gradient, normalize)


def _check(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, hash_bits: int, gradient: str
) -> None:
    checks.qkv(q, k, v)
    checks.key_mask(key_mask, k)
    checks.integer("hash_bits", hash_bits, 1, MAX_HASH_BITS)
    checks.choice("gradient", gradient, GRADIENTS)


class YosoAttention(SeededAttention):
    """`yoso` as a module: fresh hashes in training, fixed ones in eval, none for short inputs.

    Args:
        num_heads: heads H of the tensors to come.
        exact_below: tokens. Fewer keys than this, padding included, are not sampled: the module is
            then `yoso_expectation` with the same `hash_bits`, `gradient`, `normalize` and `impl`,
            in training and in eval, and draws no seed. 0 always samples. None takes the
            crossover where `yoso_expectation` has a fused kernel, which is free of noise: 2,048 in
            bfloat16, below which it is faster than sampling, 1,024 in float16, where it is faster
            forward, and float32, where it is faster with backward. 0 elsewhere.
        conv_kernel: as in every module, see `Attention`.
        options: of `yoso`, which itself samples at every length.
    """

    function = staticmethod(yoso)

    def __init__(
        self,
        num_heads: int,
        *,
        exact_below: int | None = None,
        conv_kernel: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_heads, conv_kernel=conv_kernel, **options)
        if exact_below is not None:
            checks.integer("exact_below", exact_below, 0)
        self.exact_below = exact_below

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """The sample, or under `exact_below` keys what it estimates."""
        exact_below = self.exact_below
        if exact_below is None:
            fused = not why_expectation_not_fused(q.device)
            exact_below = EXACT_BELOW.get(q.dtype, 0) if fused else 0
        if k.shape[2] >= exact_below:
            return super().attend(q, k, v, key_mask)
        options = {name: self.options[name] for name in EXACT_OPTIONS if name in self.options}
        return yoso_expectation(q, k, v, key_mask=key_mask, **options)

    def extra_repr(self) -> str:
        """Show heads and options in the printed module."""
        shown = super().extra_repr()
        return shown if self.exact_below is None else f"{shown}, exact_below={self.exact_below}"


class YosoExpectationAttention(Attention):
    """`yoso_expectation` as a module."""

    function = staticmethod(yoso_expectation)
