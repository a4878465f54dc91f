"""Tiny, randomly initialised models of transformers, one of each kind that `convert` promises."""

import tokenizers
import torch
import transformers
from transformers import PreTrainedModel

SMALL = dict(
    vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
)
PADDING = 1  # RoBERTa's, YOSO's and others' padding token; the rest take any

ENCODERS = {
    "bert": lambda **k: (transformers.BertModel, transformers.BertConfig(**SMALL, **k)),
    "roberta": lambda **k: (transformers.RobertaModel, transformers.RobertaConfig(**SMALL, **k)),
    "xlm-roberta": lambda **k: (
        transformers.XLMRobertaModel,
        transformers.XLMRobertaConfig(**SMALL, **k),
    ),
    "albert": lambda **k: (
        transformers.AlbertModel,
        transformers.AlbertConfig(**SMALL, embedding_size=16, **k),
    ),
    "electra": lambda **k: (
        transformers.ElectraModel,
        transformers.ElectraConfig(**SMALL, embedding_size=16, **k),
    ),
    "distilbert": lambda **k: (
        transformers.DistilBertModel,
        transformers.DistilBertConfig(
            vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=48, **k
        ),
    ),
    "esm": lambda **k: (
        transformers.EsmModel,
        transformers.EsmConfig(
            **SMALL, pad_token_id=1, mask_token_id=3, **{"position_embedding_type": "rotary", **k}
        ),
    ),
    "modernbert": lambda **k: (
        transformers.ModernBertModel,
        transformers.ModernBertConfig(
            **{**SMALL, "num_hidden_layers": 4}, local_attention=8, global_attn_every_n_layers=3,
            pad_token_id=1, **k,
        ),
    ),
    "eurobert": lambda **k: (
        transformers.EuroBertModel,
        transformers.EuroBertConfig(**SMALL, num_key_value_heads=2, pad_token_id=1, **k),
    ),
    "nomic-bert": lambda **k: (
        transformers.NomicBertModel,
        transformers.NomicBertConfig(**SMALL, pad_token_id=1, **k),
    ),
}  # fmt: skip
PORTS = {
    "yoso": lambda **k: (transformers.YosoModel, transformers.YosoConfig(**SMALL, **k)),
    "nystromformer": lambda **k: (
        transformers.NystromformerModel,
        transformers.NystromformerConfig(**SMALL, **{"conv_kernel_size": 5, **k}),
    ),
}


def make(name: str, seed: int = 0, **config) -> PreTrainedModel:
    """A tiny encoder in eval mode, with weights large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    model_class, made = {**ENCODERS, **PORTS}[name](**config)
    return enlarge(model_class(made)).eval()


def enlarge(model):
    """Scale matrices up: transformers starts them so small that every attention is uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name.lower():
                parameter.mul_(6)
    return model


def vit(**config) -> PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=32, patch_size=4, **config,
    )  # fmt: skip
    return enlarge(transformers.ViTModel(config)).eval()


def batch(lengths=(40, 29, 7), vocab_size=99, seed=0):
    """Token ids, padded on the right, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.randint(5, vocab_size, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return ids.masked_fill(~mask, PADDING), mask.long()


def checkpoint(folder, model_class, config, words=("paris", "france", "is", "the", "of", "a")):
    """A tiny model and a tokenizer of single words, saved as a checkpoint."""
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", mask_token="<mask>"
    ).save_pretrained(folder)
    enlarge(model_class(config)).save_pretrained(folder)
    return folder
