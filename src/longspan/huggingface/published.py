"""YOSO and Nyströmformer checkpoints of transformers, as longspan models.

`uw-madison/yoso-4096` and `uw-madison/nystromformer-{512,1024,2048,4096}` hold these names.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from longspan.huggingface.conversion import choose
from longspan.models import (
    LongspanConfig,
    LongspanForMaskedLM,
    LongspanForQuestionAnswering,
    LongspanForSequenceClassification,
    LongspanForTokenClassification,
    LongspanModel,
    LongspanPreTrainedModel,
)

RENAMES = (
    (r"^(yoso|nystromformer)\.", "longspan."),
    (r"embeddings\.LayerNorm\.", "embeddings.norm."),
    (r"encoder\.layer\.", "layers."),
    (r"attention\.self\.conv\.", "attention.attention.conv."),
    (r"attention\.self\.", "attention."),
    (r"attention\.output\.dense\.", "attention.output."),
    (r"attention\.output\.LayerNorm\.", "attention_norm."),
    (r"intermediate\.dense\.", "up."),
    (r"(layers\.\d+)\.output\.dense\.", r"\1.down."),
    (r"(layers\.\d+)\.output\.LayerNorm\.", r"\1.output_norm."),
    (r"^cls\.predictions\.bias$", "predictions.decoder.bias"),
    (r"^cls\.predictions\.transform\.LayerNorm\.", "predictions.norm."),
    (r"^cls\.predictions\.transform\.dense\.", "predictions.dense."),
    (r"^cls\.predictions\.", "predictions."),
    (r"^classifier\.out_proj\.", "classifier.output."),
    (r"^qa_outputs\.", "span."),
)
HEADS: dict[str, type[LongspanPreTrainedModel]] = {
    "Model": LongspanModel,
    "ForMaskedLM": LongspanForMaskedLM,
    "ForQuestionAnswering": LongspanForQuestionAnswering,
    "ForSequenceClassification": LongspanForSequenceClassification,
    "ForTokenClassification": LongspanForTokenClassification,
}


def from_transformers(
    model: PreTrainedModel, method: str | None = None, **options: Any
) -> LongspanPreTrainedModel:
    """A longspan model with the weights of a YOSO or Nyströmformer model of transformers.

    Args:
        model: of transformers, as `from_pretrained("uw-madison/yoso-4096")` gives it.
        method: as in `longspan.convert`: None is the model's own, done right.
        options: of the method's module.
    """
    head = re.sub("^(Yoso|Nystromformer)", "", type(model).__name__)
    if model.config.model_type not in ("yoso", "nystromformer") or head not in HEADS:
        raise ValueError(
            "model must be a YOSO or Nyströmformer of transformers with one of "
            f"{', '.join(HEADS)}, got {type(model).__name__}"
        )
    ours = HEADS[head](config_from(model.config, method, **options))
    ours.load_state_dict(rename(model.state_dict()))
    return ours.to(model.device, model.dtype).train(model.training)


def config_from(
    config: PreTrainedConfig, method: str | None = None, **options: Any
) -> LongspanConfig:
    """The longspan configuration of a YOSO or Nyströmformer configuration of transformers."""
    method, options = choose(config, method, options)
    window = config.conv_window if config.model_type == "yoso" else config.conv_kernel_size
    if window is not None:
        options.setdefault("conv_kernel", window)
    same = (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "intermediate_size", "hidden_act", "hidden_dropout_prob", "max_position_embeddings",
        "type_vocab_size", "layer_norm_eps", "initializer_range", "pad_token_id", "id2label",
        "label2id", "tie_word_embeddings",
    )  # fmt: skip
    return LongspanConfig(
        **{name: getattr(config, name) for name in same},
        position_offset=2,
        method=method,
        options=options,
    )


def rename(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a YOSO or Nyströmformer of transformers under longspan's names."""
    renamed = {}
    for name, tensor in state_dict.items():
        if name.endswith("embeddings.position_ids"):
            continue  # a table 2, 3, 4, … that old files carry
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed
