"""What our models and converted ones share: methods built for layers, attention masks read."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from longspan.attention.linformer import SequenceProjection
from longspan.attention.methods import find
from longspan.attention.module import Attention


def build(
    method: str, heads: Sequence[int], options: dict[str, Any], max_length: int | None
) -> list[Attention]:
    """Make the attention of every layer: `heads` holds the number of heads of each.

    A method made for a length (Linformer) is made for `max_length` unless `options` says another.
    `sharing="layerwise"` gives all layers one projection.
    """
    module = find(method).module
    options = dict(options)
    if "max_length" in inspect.signature(module).parameters and "max_length" not in options:
        if max_length is None:
            raise ValueError(f"max_length must be given for {method}: the model names no length")
        options["max_length"] = max_length
    if options.get("sharing") == "layerwise" and isinstance(options.get("projection", ""), str):
        options["projection"] = SequenceProjection(
            options["max_length"],
            options.get("projected_length", 256),
            kind=options.get("projection", "linear"),
        )
    return [module(num_heads, **options) for num_heads in heads]


def key_mask(attention_mask: Tensor | None) -> Tensor | None:
    """Read transformers' forms of a padding mask into a boolean (B, Nk), true = attend.

    (B, Nk) of booleans or of 0 and 1, and (B, 1, 1, Nk) of booleans or of 0 and a huge negative
    number. Anything else says more than which keys are padding, and is refused.
    """
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    additive = attention_mask.dim() == 4 and attention_mask.is_floating_point()
    if attention_mask.dim() == 4 and shape[1:3] == (1, 1):
        attention_mask = attention_mask[:, 0, 0]
    if attention_mask.dim() != 2:
        raise NotImplementedError(
            "attention_mask must say which keys are padding, as (B, N) or (B, 1, 1, N): "
            f"a mask for every pair of tokens cannot be honoured at linear cost, got shape {shape}"
        )
    if attention_mask.dtype == torch.bool:
        return attention_mask
    visible = attention_mask == 0 if additive else attention_mask != 0
    hidden = attention_mask <= -1e4 if additive else attention_mask == 0
    if attention_mask.is_floating_point():
        # Checked on the device: reading the answer here would make the host wait for it.
        known = visible | hidden if additive else hidden | (attention_mask == 1)
        form = "0 or at most -1e4 where it is added to scores" if additive else "0 or 1"
        torch._assert_async(known.all(), f"attention_mask must hold {form}")
    return visible


def declare_shared(model: PreTrainedModel) -> None:
    """Tell transformers which projections are one, as it asks for when it saves and loads."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, SequenceProjection) and module.weight is not None:
            source = first.setdefault(id(module), name)
            if source != name:
                shared[f"{name}.weight"] = f"{source}.weight"
    before = getattr(model, "_longspan_shared", {})  # of what was converted before
    if shared or before:
        for known in ("_tied_weights_keys", "all_tied_weights_keys"):
            kept = {k: v for k, v in (getattr(model, known) or {}).items() if k not in before}
            setattr(model, known, {**kept, **shared})
        model._longspan_shared = shared
