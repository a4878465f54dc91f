"""What a model is made of, in one flat configuration."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from longspan.attention import checks
from longspan.attention.methods import find

NORMS = ("post", "pre")
POSITIONS = ("learned", "rotary")
POOLINGS = ("first", "mean", "padded-mean")


class LongspanConfig(PreTrainedConfig):
    """Configuration of a longspan encoder.

    Args:
        method: a key of `longspan.METHODS`.
        options: of the method's module: `{"num_hashes": 64, "conv_kernel": 33}`. Linformer's
            `max_length` is `max_position_embeddings` unless given.
        activation_dropout: of what is between the two layers of a perceptron.
        norm: "post" normalises after each residual sum (BERT), "pre" before each part.
        embedding_size: width of the token embeddings where smaller than `hidden_size` (ALBERT).
        embedding_norm: whether the sum of the embeddings is normalised (BERT).
        embedding_range: deviation that embeddings start with, `initializer_range` by default.
        positions: "learned" absolute embeddings, or "rotary" turns of queries and keys.
        position_offset: first row of the learned positions in use; 2 in published checkpoints.
        rotary_base: wavelengths of rotary positions run from 2π to about 2π · rotary_base.
        pooling: what classifiers read: the "first" token, the "mean" over valid tokens, or their
            sum over the padded length ("padded-mean"), which shrinks with padding: for comparisons
            with results that were published so.
        classifier_size: channels between the two layers of a classifier, `hidden_size` by default.
        classifier_act: its activation, `hidden_act` by default.
        classifier_dropout: of what its layers read, `hidden_dropout_prob` by default.

    The others mean what they mean in BERT. There is no attention dropout: linear methods have no
    weights to drop.
    """

    model_type = "longspan"

    vocab_size: int = 30000
    hidden_size: int = 768
    embedding_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    activation_dropout: float = 0.0
    max_position_embeddings: int = 4096
    positions: str = "learned"
    position_offset: int = 0
    rotary_base: float = 10000.0
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02
    embedding_range: float | None = None
    embedding_norm: bool = True
    norm: str = "post"
    pooling: str = "first"
    classifier_size: int | None = None
    classifier_act: str | None = None
    classifier_dropout: float | None = None
    method: str = "yoso"
    options: dict[str, Any] | None = None
    pad_token_id: int | None = 0
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        """Check what is not checked elsewhere, once."""
        self.options = dict(self.options or {})
        find(self.method)
        checks.choice("hidden_act", self.hidden_act, ACT2FN)
        if self.classifier_act is not None:
            checks.choice("classifier_act", self.classifier_act, ACT2FN)
        for name in ("hidden_dropout_prob", "activation_dropout", "classifier_dropout"):
            if not 0 <= (getattr(self, name) or 0) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        checks.choice("norm", self.norm, NORMS)
        checks.choice("positions", self.positions, POSITIONS)
        checks.choice("pooling", self.pooling, POOLINGS)
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                "hidden_size must be a multiple of num_attention_heads, "
                f"got {self.hidden_size} and {self.num_attention_heads}"
            )
        if self.positions == "rotary" and self.hidden_size // self.num_attention_heads % 2:
            raise ValueError(
                "hidden_size / num_attention_heads must be even with rotary positions, "
                f"got {self.hidden_size} / {self.num_attention_heads}"
            )
        super().__post_init__(**kwargs)
