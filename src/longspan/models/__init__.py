"""Encoders with any method inside, as transformers' models; needs `longspan[huggingface]`.

>>> from longspan.models import LongspanConfig, LongspanForMaskedLM
>>> model = LongspanForMaskedLM(LongspanConfig(method="nystrom", options={"num_landmarks": 64}))
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from longspan.models.configuration import LongspanConfig
from longspan.models.encoder import LongspanModel, LongspanPreTrainedModel
from longspan.models.heads import (
    LongspanForMaskedLM,
    LongspanForPairClassification,
    LongspanForPreTraining,
    LongspanForQuestionAnswering,
    LongspanForSequenceClassification,
    LongspanForTokenClassification,
)

__all__ = [
    "LongspanConfig",
    "LongspanForMaskedLM",
    "LongspanForPairClassification",
    "LongspanForPreTraining",
    "LongspanForQuestionAnswering",
    "LongspanForSequenceClassification",
    "LongspanForTokenClassification",
    "LongspanModel",
    "LongspanPreTrainedModel",
]

AutoConfig.register(LongspanConfig.model_type, LongspanConfig, exist_ok=True)
for _auto, _model in (
    (AutoModel, LongspanModel),
    (AutoModelForMaskedLM, LongspanForMaskedLM),
    (AutoModelForPreTraining, LongspanForPreTraining),
    (AutoModelForQuestionAnswering, LongspanForQuestionAnswering),
    (AutoModelForSequenceClassification, LongspanForSequenceClassification),
    (AutoModelForTokenClassification, LongspanForTokenClassification),
):
    _auto.register(LongspanConfig, _model, exist_ok=True)
