"""The encoder with a head for each kind of task."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    MaskedLMOutput,
    ModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from longspan.models.configuration import LongspanConfig
from longspan.models.encoder import LongspanModel, LongspanPreTrainedModel, pool

TIED = {"predictions.decoder.weight": "longspan.embeddings.word_embeddings.weight"}


class TokenPredictions(nn.Module):
    """Scores of the vocabulary for every token; the decoder is tied to the token embeddings."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__()
        size = config.embedding_size or config.hidden_size
        self.dense = nn.Linear(config.hidden_size, size)
        self.activation = ACT2FN[config.hidden_act]
        self.norm = nn.LayerNorm(size, config.layer_norm_eps)
        self.decoder = nn.Linear(size, config.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) → (B, N, vocab_size)."""
        return self.decoder(self.norm(self.activation(self.dense(x))))


def classifier_dropout(config: LongspanConfig) -> nn.Dropout:
    """Of what the layers of a classifier read."""
    p = config.classifier_dropout
    return nn.Dropout(config.hidden_dropout_prob if p is None else p)


class Classifier(nn.Module):
    """Two layers over a pooled vector of `width` channels."""

    def __init__(self, config: LongspanConfig, width: int, labels: int) -> None:
        super().__init__()
        size = config.classifier_size or config.hidden_size
        self.dropout = classifier_dropout(config)
        self.dense = nn.Linear(width, size)
        self.activation = ACT2FN[config.classifier_act or config.hidden_act]
        self.output = nn.Linear(size, labels)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) → (B, labels)."""
        return self.output(self.dropout(self.activation(self.dense(self.dropout(x)))))


def label_loss(logits: Tensor, labels: Tensor | None) -> Tensor | None:
    """Cross-entropy over classes; squared error where there is one output. −100 = no label, but
    for the one number of a whole sequence."""
    if labels is None:
        return None
    if logits.shape[-1] == 1:
        error = (logits[..., 0].float() - labels.float()).square()
        there = labels != -100 if labels.dim() > 1 else torch.ones_like(labels, dtype=torch.bool)
        return error.masked_fill(~there, 0).sum() / there.sum()
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


def at(x: Tensor, positions: Tensor | None) -> Tensor:
    """The rows of x (B, N, C) at positions (B, M), or all of them."""
    if positions is None:
        return x
    return x.gather(1, positions[..., None].expand(-1, -1, x.shape[-1]))


class LongspanForMaskedLM(LongspanPreTrainedModel):
    """Predicts masked tokens."""

    _tied_weights_keys = TIED

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.longspan = LongspanModel(config)
        self.predictions = TokenPredictions(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The decoder, for transformers."""
        return self.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the decoder, for transformers."""
        self.predictions.decoder = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        masked_positions: Tensor | None = None,
    ) -> MaskedLMOutput:
        """As `LongspanModel`; `labels` (B, N) holds the tokens to predict, −100 elsewhere.

        With `masked_positions` (B, M) only those places are predicted: `logits` (B, M, vocab_size),
        `labels` (B, M). At 15 % that spares most of the largest product of a small model.
        """
        out = self.longspan(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_hidden_states,
        )
        logits = self.predictions(at(out.last_hidden_state, masked_positions))
        return MaskedLMOutput(
            loss=label_loss(logits, labels), logits=logits, hidden_states=out.hidden_states
        )


@dataclass
class PreTrainingOutput(ModelOutput):
    """`prediction_logits` (B, N, vocab_size), `order_logits` (B, 2), and the sum of the losses."""

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    order_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class LongspanForPreTraining(LongspanPreTrainedModel):
    """Predicts masked tokens, and whether two sentences were swapped."""

    _tied_weights_keys = TIED

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.longspan = LongspanModel(config)
        self.predictions = TokenPredictions(config)
        self.order = Classifier(config, config.hidden_size, 2)
        self.post_init()

    get_output_embeddings = LongspanForMaskedLM.get_output_embeddings
    set_output_embeddings = LongspanForMaskedLM.set_output_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_order_label: Tensor | None = None,
        output_hidden_states: bool | None = None,
        masked_positions: Tensor | None = None,
    ) -> PreTrainingOutput:
        """As `LongspanForMaskedLM`; `sentence_order_label` (B,) is 1 where the two are swapped."""
        out = self.longspan(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_hidden_states,
        )
        logits = self.predictions(at(out.last_hidden_state, masked_positions))
        order = self.order(pool(out.last_hidden_state, attention_mask, self.config.pooling))
        losses = [label_loss(logits, labels), label_loss(order, sentence_order_label)]
        given = [loss for loss in losses if loss is not None]
        return PreTrainingOutput(
            loss=torch.stack(given).sum() if given else None,
            prediction_logits=logits,
            order_logits=order,
            hidden_states=out.hidden_states,
        )


class LongspanForSequenceClassification(LongspanPreTrainedModel):
    """One of `num_labels` classes for a sequence; with one label, a number."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.longspan = LongspanModel(config)
        self.classifier = Classifier(config, config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> SequenceClassifierOutput:
        """As `LongspanModel`; `labels` (B,)."""
        out = self.longspan(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_hidden_states,
        )
        pooled = pool(out.last_hidden_state, attention_mask, self.config.pooling)
        logits = self.classifier(pooled)
        return SequenceClassifierOutput(
            loss=label_loss(logits, labels), logits=logits, hidden_states=out.hidden_states
        )


class LongspanForPairClassification(LongspanPreTrainedModel):
    """One of `num_labels` classes for two sequences: both through the encoder, [a, b, a⊙b, a−b]."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.longspan = LongspanModel(config)
        self.classifier = Classifier(config, 4 * config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        pair_input_ids: Tensor | None = None,
        pair_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        """`input_ids` (B, N) and `pair_input_ids` (B, M), with their masks; `labels` (B,)."""
        if pair_input_ids is None:
            raise ValueError("pair_input_ids must be given: the second sequence of each pair")
        a, b = (
            pool(self.longspan(ids, mask).last_hidden_state, mask, self.config.pooling)
            for ids, mask in ((input_ids, attention_mask), (pair_input_ids, pair_attention_mask))
        )
        logits = self.classifier(torch.cat([a, b, a * b, a - b], dim=-1))
        return SequenceClassifierOutput(loss=label_loss(logits, labels), logits=logits)


class LongspanForTokenClassification(LongspanPreTrainedModel):
    """One of `num_labels` classes for every token."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.longspan = LongspanModel(config)
        self.dropout = classifier_dropout(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> TokenClassifierOutput:
        """As `LongspanModel`; `labels` (B, N), −100 where there is none."""
        out = self.longspan(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_hidden_states,
        )
        logits = self.classifier(self.dropout(out.last_hidden_state))
        return TokenClassifierOutput(
            loss=label_loss(logits, labels), logits=logits, hidden_states=out.hidden_states
        )


def _inside(positions: Tensor, length: int) -> Tensor:
    """Positions, and −100, no label, for those outside a sequence."""
    return positions.masked_fill((positions < 0) | (positions >= length), -100)


class LongspanForQuestionAnswering(LongspanPreTrainedModel):
    """The first and the last token of the answer."""

    def __init__(self, config: LongspanConfig) -> None:
        super().__init__(config)
        self.longspan = LongspanModel(config)
        self.span = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_hidden_states: bool | None = None,
    ) -> QuestionAnsweringModelOutput:
        """As `LongspanModel`; positions (B,), those outside the sequence count as no label."""
        out = self.longspan(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_hidden_states,
        )
        start, end = self.span(out.last_hidden_state).unbind(-1)  # (B, N) each
        loss = None
        if start_positions is not None and end_positions is not None:
            first, last = (
                F.cross_entropy(logits.float(), _inside(where, logits.shape[1]))
                for logits, where in ((start, start_positions), (end, end_positions))
            )
            loss = (first + last) / 2
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start, end_logits=end, hidden_states=out.hidden_states
        )
