"""Room for longer inputs in models with learned absolute positions."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.attention import checks
from longspan.attention.linformer import SequenceProjection
from longspan.huggingface.backend import ATTACHED
from longspan.models import LongspanPreTrainedModel

HOWS = ("tile", "interpolate")


def extend_positions(model: PreTrainedModel, length: int, how: str = "tile") -> PreTrainedModel:
    """Let a model with learned absolute positions take `length` tokens, in place.

    Rows that a model keeps for other things (RoBERTa's and YOSO's first two) stay where they are.
    Linformer's projections, made for a length too, are stretched to it; in a longspan model with
    rotary positions they are all that there is to do.
    The configuration follows, so the longer model is saved and loaded as such; a tokenizer has its
    own `model_max_length`.

    Args:
        model: BERT, RoBERTa, XLM-R, ALBERT, ELECTRA, DistilBERT, ESM, YOSO, Nyströmformer, or a
            longspan model: any that has `nn.Embedding`s named `position_embeddings`.
        length: tokens it shall take, no fewer than now.
        how: "tile" repeats the trained positions, as the papers did to go from 512 to 4096;
            "interpolate" stretches them.

    Returns:
        The model.
    """
    checks.integer("length", length, 1)
    checks.choice("how", how, HOWS)
    owners: list[Any] = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "position_embeddings", None), nn.Embedding)
    ]
    ours = isinstance(model, LongspanPreTrainedModel)
    if not owners and not ours:
        raise ValueError(
            "model must have learned absolute positions (an nn.Embedding position_embeddings), got "
            f"{type(model).__name__}; rotary positions need no extension, and vision models have "
            "interpolate_pos_encoding"
        )
    trained = model.config.max_position_embeddings
    for owner in owners:
        trained = owner.position_embeddings.weight.shape[0] - _kept_rows(owner)
    if length < trained:
        raise ValueError(f"length must be at least {trained}, as it is now, got {length}")
    with torch.no_grad():
        for owner in owners:
            _extend(owner, length, how)
        # Some models count the rows kept for other things in this number, some do not.
        model.config.max_position_embeddings += length - trained
        if ours:
            model.config.options = _extend_projections(model, length, model.config.options)
        elif record := getattr(model.config, ATTACHED, None):
            # Not `length`: without an option `load` makes them for the configuration's number.
            longer = model.config.max_position_embeddings
            record["options"] = _extend_projections(model, longer, record["options"])
    return model


def _extend_projections(
    model: PreTrainedModel, length: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Stretch what is made for fewer tokens; the options that make it so."""
    for module in model.modules():
        if isinstance(module, SequenceProjection) and length > module.max_length:
            module.extend(length)
    if "max_length" not in options:
        return options
    return {**options, "max_length": max(length, options["max_length"])}


def _kept_rows(owner: Any) -> int:
    """Rows before the first position."""
    if owner.position_embeddings.padding_idx is not None:
        return owner.position_embeddings.padding_idx + 1
    if isinstance(ids := getattr(owner, "position_ids", None), Tensor):
        return int(ids.min())
    return getattr(owner, "first_position", 0)


def _extend(owner: Any, length: int, how: str) -> None:
    old: nn.Embedding = owner.position_embeddings
    kept = _kept_rows(owner)
    head, body = old.weight[:kept], old.weight[kept:]
    added = length - len(body)
    if how == "tile":
        place = torch.arange(length, device=body.device) % len(body)
        rows = body[place]
    else:
        wide = body.T[None].float()  # (1, C, trained)
        rows = F.interpolate(wide, size=length, mode="linear", align_corners=True)[0].T
    weight = torch.cat([head, rows.to(old.weight.dtype)])
    new = nn.Embedding(len(weight), weight.shape[1], old.padding_idx, _weight=weight)
    new.weight.requires_grad_(old.weight.requires_grad)
    owner.position_embeddings = new
    # The tables of default ids are as long as the positions.
    if isinstance(ids := getattr(owner, "position_ids", None), Tensor):
        first = int(ids.min())
        longer = torch.arange(first, first + ids.shape[1] + added, device=ids.device)
        owner.position_ids = longer[None].to(ids.dtype)
    if isinstance(ids := getattr(owner, "token_type_ids", None), Tensor):
        owner.token_type_ids = ids.new_zeros(1, ids.shape[1] + added)
