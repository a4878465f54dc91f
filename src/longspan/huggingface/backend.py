"""Methods as attention backends of transformers: `attn_implementation="nystrom"`.

transformers asks a mask function once a forward pass what its layers may see, and hands the answer
to the attention function of every layer. Both are registered under the method's name: without the
mask function transformers passes no mask at all, and says nothing.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function as everything

from longspan.attention.methods import METHODS, refuse_causal
from longspan.attention.module import Attention
from longspan.attention.window import window
from longspan.models.attention import key_mask

# The name under which `convert` attaches a method to a module: its weights are saved with the rest.
ATTACHED = "longspan"

# What models hand to attention besides tensors and mask, and no method here can honour.
NOT_HONOURED = {
    "output_attentions": "the N × N weights never exist",
    "position_bias": "it is a number for every pair of tokens",
    "softcap": "it bends the score of every pair of tokens",
    "s_aux": "methods have no attention sinks",
    "indices": "it picks keys for every query",
    "block_indices": "it picks keys for every query",
    "cu_seq_lens_q": "methods do not take packed sequences; pad them and pass attention_mask",
    "cu_seqlens": "methods do not take packed sequences; pad them and pass attention_mask",
}


def register() -> None:
    """Register every method of METHODS, with its mask function."""
    for method in METHODS:
        AttentionInterface.register(method, partial(attend, method))
        AttentionMaskInterface.register(method, mask)


def attend(
    method: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend for a module of transformers: (B, H, N, D) tensors in, (B, N, H, Dv) out.

    A module that `convert` has changed uses what was attached to it; any other the method with its
    default options. A layer with a sliding window of its own keeps it: `window` computes it.
    """
    config = getattr(module, "config", None)
    others["output_attentions"] = others.get("output_attentions") or getattr(
        config, "output_attentions", False
    )
    for name, reason in NOT_HONOURED.items():
        if others.get(name) is not None and others[name] is not False:
            raise NotImplementedError(f"{name} cannot be honoured by {method}: {reason}")
    if getattr(module, "is_causal", False) if is_causal is None else is_causal:
        refuse_causal(method)
    converted = bool(getattr(config, ATTACHED, None))
    if dropout and not converted:
        raise NotImplementedError(
            f"dropout of attention weights cannot be honoured by {method}: it has no weights to "
            "drop. Set the model's attention dropout to 0, or use longspan.convert, which trains "
            f"without it, got {dropout}"
        )
    visible, reach = read(attention_mask)
    if reach is None and sliding_window is not None:
        reach = sliding_window - 1  # transformers' flash convention: it counts the token itself
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    run: Callable[..., Tensor]
    if reach is not None:
        run = partial(window, window=reach)
    else:
        run = _attached(method, module) if converted else _plain(method, module.training)
    y = run(query, key, value, key_mask=visible)
    return y.transpose(1, 2).contiguous(), None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | None = None,
    config: PreTrainedConfig | None = None,
    **others: Any,
) -> Tensor | None:
    """The mask transformers hands to every layer: which keys are tokens, (B, Nk), or None for all.

    Linear in N, and nothing is read back from the device. A sliding window of `reach` tokens on
    either side makes it (B, Nk, 1 + reach): a view that repeats the mask and takes no memory, so
    that the window cannot get lost on the way (`read` takes it apart). Other patterns are refused.
    """
    # Only transformers' bidirectional patterns come with this argument; what it holds is for SDPA.
    two_sided = "allow_is_bidirectional_skip" in others
    if use_vmap or not two_sided or (local_size is None) != (mask_function is everything):
        raise NotImplementedError(
            "attn_implementation must not be a longspan method for this model: it wants a causal "
            "mask or one of its own, and longspan's methods see all tokens in both directions"
        )
    port = config is not None and config.model_type == "nystromformer"
    if port and not getattr(config, ATTACHED, None):
        raise ValueError(
            "attn_implementation must be left out for transformers' Nyströmformer, which would add "
            "this mask to its scores: longspan.convert(model) gives it another attention"
        )
    attention_mask = key_mask(attention_mask)
    if attention_mask is not None:
        attention_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    if local_size is None:
        return attention_mask
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, dtype=torch.bool, device=device)
        attention_mask = attention_mask.expand(batch_size, kv_length)
    return attention_mask[..., None].expand(-1, -1, 1 + local_size)


def read(attention_mask: Tensor | None) -> tuple[Tensor | None, int | None]:
    """A key mask (B, Nk) and the reach of a sliding window, of what a layer got as its mask."""
    if attention_mask is not None and attention_mask.dim() == 3 and attention_mask.stride(2) == 0:
        return attention_mask[..., 0], attention_mask.shape[2] - 1
    return key_mask(attention_mask), None


def _attached(method: str, module: nn.Module) -> Attention:
    """What `convert` attached to a module; an error where that is not what is asked for."""
    attached = getattr(module, ATTACHED, None)
    if attached is None:
        raise ValueError(
            "attn_implementation must be left out for a model saved after longspan.convert: "
            f"longspan.huggingface.load reads it, got {method!r}"
        )
    if not isinstance(attached, METHODS[method].module):
        raise ValueError(
            f"attn_implementation must be what the model was converted to "
            f"({type(attached).__name__}), got {method!r}; longspan.convert changes it"
        )
    return attached


# A module without options has no state of its own but its mode, so two serve every layer.
_PLAIN = {
    (method, training): row.module(1).train(training)
    for method, row in METHODS.items()
    for training in (True, False)
    if all(
        p.default is not p.empty or p.kind is p.VAR_KEYWORD
        for p in list(inspect.signature(row.module).parameters.values())[1:]
    )
}


def _plain(method: str, training: bool) -> Callable[..., Tensor]:
    """A method with its default options, for any number of heads."""
    if (method, training) not in _PLAIN:
        raise ValueError(
            f"attn_implementation must be a method without learned parts, got {method!r}: "
            f"longspan.convert(model, {method!r}) attaches them"
        )
    module = _PLAIN[method, training]
    return lambda q, k, v, key_mask: module.attend(q, k, v, key_mask)
