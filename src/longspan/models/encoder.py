"""The encoder: embeddings, layers, and the class that transformers loads and saves."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import can_return_tuple

from longspan.attention.linformer import SequenceProjection
from longspan.attention.module import Attention
from longspan.models.attention import build, declare_shared, key_mask
from longspan.models.configuration import LongspanConfig


class LongspanEmbeddings(nn.Module):
    """Token + type + learned position; widened to the hidden size if narrower."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__()
        size = config.embedding_size or config.hidden_size
        self.first_position = config.position_offset
        self.word_embeddings = nn.Embedding(config.vocab_size, size, config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, size)
        self.position_embeddings: nn.Embedding | None = None
        if config.positions == "learned":
            rows = config.max_position_embeddings + config.position_offset
            self.position_embeddings = nn.Embedding(rows, size)
        self.norm: nn.Module = nn.Identity()
        if config.embedding_norm:
            self.norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.projection: nn.Module = nn.Identity()
        if size != config.hidden_size:
            self.projection = nn.Linear(size, config.hidden_size)

    def forward(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor,
    ) -> Tensor:
        """(B, N) ids or (B, N, embedding_size) embeddings → (B, N, hidden_size)."""
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if token_type_ids is None:
            x = x + self.token_type_embeddings.weight[0]
        else:
            x = x + self.token_type_embeddings(token_type_ids)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(position_ids + self.first_position)
        return self.projection(self.dropout(self.norm(x)))


class LongspanSelfAttention(nn.Module):
    """Projections around a method."""

    def __init__(self, config: LongspanConfig, attention: Attention) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(size, size) for _ in range(3))
        self.attention = attention
        self.output = nn.Linear(size, size)

    def forward(self, x: Tensor, mask: Tensor | None, turns: Tensor | None) -> Tensor:
        """x (B, N, C), mask (B, N), turns (2, B or 1, 1, N, D/2) → (B, N, C)."""
        q, k, v = (
            project(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # (B, H, N, D)
            for project in (self.query, self.key, self.value)
        )
        if turns is not None:
            q, k = rotate(q, turns), rotate(k, turns)
        y = self.attention(q, k, v, key_mask=mask)
        return self.output(y.transpose(1, 2).flatten(2))


class LongspanLayer(GradientCheckpointingLayer):
    """Attention and a two-layer perceptron, each with a residual sum and a norm."""

    def __init__(self, config: LongspanConfig, attention: Attention) -> None:
        super().__init__()
        self.pre = config.norm == "pre"
        self.attention = LongspanSelfAttention(config, attention)
        self.attention_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACT2FN[config.hidden_act]
        self.inner_dropout = nn.Dropout(config.activation_dropout)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, mask: Tensor | None, turns: Tensor | None) -> Tensor:
        """x (B, N, C) → (B, N, C)."""
        if self.pre:
            x = x + self.dropout(self.attention(self.attention_norm(x), mask, turns))
            return x + self.dropout(self.perceptron(self.output_norm(x)))
        x = self.attention_norm(x + self.dropout(self.attention(x, mask, turns)))
        return self.output_norm(x + self.dropout(self.perceptron(x)))

    def perceptron(self, x: Tensor) -> Tensor:
        """Each token by itself: (B, N, C) → (B, N, C)."""
        return self.down(self.inner_dropout(self.activation(self.up(x))))


class LongspanPreTrainedModel(PreTrainedModel):
    """What all longspan models share in transformers."""

    config: LongspanConfig
    base_model_prefix = "longspan"
    supports_gradient_checkpointing = True
    _no_split_modules = ("LongspanLayer",)

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        if config._attn_implementation != "eager":  # what transformers sets when nothing is asked
            raise ValueError(
                "attn_implementation must be left out for longspan models: config.method names the "
                f"method, got {config._attn_implementation!r}"
            )

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SequenceProjection):
            module.reset_parameters()
        start = self.config.embedding_range
        loaded = isinstance(module, nn.Embedding) and hasattr(module.weight, "_is_hf_initialized")
        if isinstance(module, nn.Embedding) and start is not None and not loaded:
            module.weight.mul_(start / self.config.initializer_range)


class LongspanModel(LongspanPreTrainedModel):
    """The encoder alone: token ids in, one vector a token out."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.embeddings = LongspanEmbeddings(config)
        heads = [config.num_attention_heads] * config.num_hidden_layers
        attentions = build(
            config.method, heads, config.options or {}, config.max_position_embeddings
        )
        self.layers = nn.ModuleList(LongspanLayer(config, attention) for attention in attentions)
        self.final_norm: nn.Module = nn.Identity()
        if config.norm == "pre":
            self.final_norm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.post_init()
        declare_shared(self)

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings, for transformers."""
        return self.embeddings.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embeddings, for transformers."""
        self.embeddings.word_embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutput:
        """Encode.

        Args:
            input_ids: (B, N).
            attention_mask: (B, N), 1 or true = a token, 0 = padding.
            token_type_ids: (B, N), zeros by default.
            position_ids: (B, N) or (1, N), 0…N−1 by default.
            inputs_embeds: (B, N, embedding_size) instead of `input_ids`.
            output_hidden_states: return the input and output of every layer, too.
            output_attentions: must be false: the N × N weights never exist.

        Returns:
            `last_hidden_state` (B, N, hidden_size), `hidden_states` if asked for.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids must be given, or inputs_embeds, got both or neither")
        if output_attentions or self.config.output_attentions:
            raise NotImplementedError(
                f"output_attentions cannot be honoured by {self.config.method}: "
                "the N × N weights never exist"
            )
        given = input_ids if inputs_embeds is None else inputs_embeds
        assert given is not None
        tokens = given.shape[1]
        if self.config.positions == "learned" and tokens > self.config.max_position_embeddings:
            raise ValueError(
                f"input_ids must have at most max_position_embeddings = "
                f"{self.config.max_position_embeddings} tokens, got {tokens}; "
                "longspan.extend_positions makes room for more"
            )
        if position_ids is None:
            position_ids = torch.arange(tokens, device=given.device)[None]
        x = self.embeddings(input_ids, inputs_embeds, token_type_ids, position_ids)
        mask = key_mask(attention_mask)
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(
                f"attention_mask must have shape (B, N) = {tuple(x.shape[:2])}, "
                f"got {tuple(mask.shape)}"
            )
        turns = self._turns(position_ids) if self.config.positions == "rotary" else None
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states: tuple[Tensor, ...] = ()
        for layer in self.layers:
            if output_hidden_states:
                states += (x,)
            x = layer(x, mask, turns)
        x = self.final_norm(x)
        return BaseModelOutput(
            last_hidden_state=x, hidden_states=(*states, x) if output_hidden_states else None
        )

    def _turns(self, position_ids: Tensor) -> Tensor:
        """Cosines and sines of position · base^(−2i/D): (2, B or 1, 1, N, D/2)."""
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        step = torch.arange(half, device=position_ids.device, dtype=torch.float32) / half
        angle = position_ids[:, None, :, None] * self.config.rotary_base**-step
        return torch.stack([angle.cos(), angle.sin()])


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn each pair of channels (i, i + D/2) of x (B, H, N, D) by its token's angle."""
    cos, sin = turns
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def pool(x: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    """One vector a sequence: (B, N, C) → (B, C)."""
    if pooling == "first":
        return x[:, 0]
    mask: Any = key_mask(attention_mask)
    if mask is None:
        return x.mean(1)
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.masked_fill(~mask[..., None], 0).sum(1, dtype=wide)
    count = x.shape[1] if pooling == "padded-mean" else mask.sum(1, keepdim=True).clamp(min=1)
    return (total / count).to(x.dtype)
