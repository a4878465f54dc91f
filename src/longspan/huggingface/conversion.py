"""Give a Hugging Face encoder another attention, in place."""

import copy
import inspect
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.nystromformer.modeling_nystromformer import NystromformerSelfAttention
from transformers.models.yoso.modeling_yoso import YosoSelfAttention

from longspan.attention.base import hide
from longspan.attention.methods import METHODS, find
from longspan.attention.module import Attention
from longspan.huggingface.backend import ATTACHED
from longspan.models.attention import build, declare_shared, key_mask
from longspan.models.encoder import LongspanPreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)
# What transformers wants to know both for the configuration and for the weights.
HUB = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def convert(model: Model, method: str | None = None, **options: Any) -> Model:
    """Give every attention of an encoder another method, in place, and return the model.

    Weights stay; the method with its options takes the place of softmax (or of the broken YOSO and
    Nyström of transformers). What it learns besides (`conv_kernel`, which starts at zero, and
    Linformer's projections) is attached to the attention modules under `longspan`, and is trained
    and saved with the model; `longspan.huggingface.load` reads it back. Layers with a sliding
    window (ModernBERT's) keep their window, at linear cost. Attention dropout is off from then on:
    there are no weights to drop.

    Args:
        model: an encoder that goes through transformers' attention interface (BERT, RoBERTa,
            ALBERT, ELECTRA, DistilBERT, ESM, ModernBERT, ViT, …), or transformers' own YOSO or
            Nyströmformer.
        method: a key of METHODS. None is the method of the model itself: `yoso` with the hashes
            of its configuration, or `nystrom` with its landmarks. For a model without one, it is
            what it was converted to when it was saved.
        options: of the method's module.

    Raises:
        NotImplementedError: for causal and encoder-decoder models.
        ValueError, TypeError: for models whose attention cannot be reached, and wrong options.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    config = model.config
    if isinstance(model, LongspanPreTrainedModel):
        raise ValueError(
            "model must not be a longspan model already: its config.method names its method, "
            f"got {type(model).__name__}"
        )
    found = {name: m for name, m in model.named_modules() if _is_attention(m)}
    if not found:
        raise ValueError(
            "model must go through transformers' attention interface, or be transformers' YOSO "
            f"or Nyströmformer, got {type(model).__name__}"
        )
    _refuse_causal(model, found)
    again = method is None and bool(getattr(config, ATTACHED, None))
    method, options = choose(config, method, options)
    # A layer with a sliding window keeps it: the backend computes it, whatever the method.
    own = {k: m for k, m in found.items() if getattr(m, "sliding_window", None) is None}
    attentions = _build(method, list(own.values()), options, config)
    if again and any(True for attention in attentions for _ in attention.parameters()):
        raise ValueError(
            f"model must be read by longspan.huggingface.load, with what {method} learned, got one "
            f"without: {type(model).__name__} of {config.name_or_path!r}"
        )

    for (name, module), attention in zip(own.items(), attentions, strict=True):
        if isinstance(module, YosoSelfAttention | NystromformerSelfAttention):
            parent, _, child = name.rpartition(".")
            module = SelfAttention(module)
            setattr(model.get_submodule(parent), child, module)
        like = next(module.parameters())
        setattr(module, ATTACHED, attention.to(like.device, like.dtype).train(module.training))
    # Models made from one configuration share it: from here on this one has its own.
    copied: dict[int, Any] = {}
    for part in model.modules():
        if isinstance(shared := getattr(part, "config", None), PreTrainedConfig):
            part.config = copy.deepcopy(shared, copied)
            part.config._attn_implementation = method
            # Saved with the configuration: `from_pretrained` then asks for the backend, and fails
            # without longspan instead of running softmax.
            part.config.attn_implementation = method
            setattr(part.config, ATTACHED, {"method": method, "options": options})
    declare_shared(model)
    return model


class SelfAttention(nn.Module):
    """In the place of transformers' YOSO or Nyström attention, with the same parameters."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.num_attention_heads = old.num_attention_heads
        self.query, self.key, self.value = old.query, old.key, old.value
        self.conv: nn.Module | None = getattr(old, "conv", None)
        self.train(old.training)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor]:
        """(B, N, C) → (B, N, C), in the tuple that transformers' layer expects."""
        if output_attentions:
            raise NotImplementedError(
                "output_attentions cannot be honoured: the N × N weights never exist"
            )
        q, k, v = (
            project(hidden_states).unflatten(2, (self.num_attention_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mask = key_mask(attention_mask)
        attention: Any = getattr(self, ATTACHED)
        y = attention(q, k, v, key_mask=mask)
        if self.conv is not None:
            y = y + self.conv(hide(v, mask))
        return (y.transpose(1, 2).flatten(2),)


def load(model_class: type, path: str, **kwargs: Any) -> PreTrainedModel:
    """Load a model that was saved after `convert`, with what its method learned.

    Args:
        model_class: `BertForMaskedLM`, or an Auto class such as `AutoModelForMaskedLM`.
        path: the folder or hub name that `save_pretrained` or `push_to_hub` wrote.
        kwargs: of transformers' `from_pretrained`. Weights are read from safetensors alone.
    """
    for name, reason in (
        ("trust_remote_code", "code from a hub is never run"),
        ("attn_implementation", "the configuration names the method"),
    ):
        if kwargs.pop(name, None):
            raise ValueError(f"{name} must be left out: {reason}")
    hub = {name: kwargs.pop(name) for name in HUB if name in kwargs}
    config, kwargs = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **hub, **kwargs)
    record = getattr(config, ATTACHED, None)
    if not record:
        raise ValueError(
            f"path must hold a model saved after longspan.convert, got {path!r}; any other is "
            "loaded by from_pretrained and then converted"
        )
    if hasattr(model_class, "_model_mapping"):
        model_class = model_class._model_mapping[type(config)]

    # transformers makes the model, then fills it: what is attached must be there in between.
    def __init__(self: Any, config: PreTrainedConfig, *args: Any, **more: Any) -> None:
        model_class.__init__(self, config, *args, **more)  # type: ignore[misc]
        convert(self, record["method"], **record["options"])

    names = {n: getattr(model_class, n) for n in ("__module__", "__qualname__", "__doc__")}
    converted: Any = type(model_class.__name__, (model_class,), {**names, "__init__": __init__})
    found = converted.from_pretrained(path, config=config, use_safetensors=True, **hub, **kwargs)
    model = found[0] if isinstance(found, tuple) else found  # with output_loading_info two
    model.__class__ = model_class
    return found


def _is_attention(module: nn.Module) -> bool:
    """Whether a module calls transformers' attention interface, or is one that `convert` knows."""
    if isinstance(module, YosoSelfAttention | NystromformerSelfAttention | SelfAttention):
        return True
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _refuse_causal(model: PreTrainedModel, found: dict[str, nn.Module]) -> None:
    config = model.config
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "its decoder is causal"
    elif getattr(config, "is_decoder", False) or getattr(config, "is_causal", False):
        reason = "its configuration makes it a decoder"
    else:
        causal = [name for name, m in found.items() if getattr(m, "is_causal", False)]
        if causal:
            reason = f"{causal[0]} is causal"
    if reason:
        raise NotImplementedError(
            f"{type(model).__name__} cannot be converted: {reason}, and longspan's methods see in "
            "both directions"
        )


def choose(
    config: PreTrainedConfig, method: str | None, options: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """The method asked for, or a model's own; its options over those of the configuration."""
    own: dict[str, dict[str, Any]] = {}
    if config.model_type == "yoso":
        bits = {"hash_bits": config.hash_code_len}
        hashing = "hadamard" if config.use_fast_hash else "gaussian"
        own = {
            "yoso": {**bits, "num_hashes": config.num_hash, "hashing": hashing},
            "yoso_expectation": bits,
        }
    elif config.model_type == "nystromformer":
        own = {"nystrom": {"num_landmarks": config.num_landmarks}}
    if method is None and not own:
        if record := getattr(config, ATTACHED, None):
            return record["method"], {**record["options"], **options}
        names = ", ".join(repr(name) for name in METHODS)
        raise ValueError(
            f"method must be one of {names} for a model without a method of its own "
            f"({config.model_type}), got None"
        )
    method = next(iter(own)) if method is None else method
    find(method)
    return method, {**own.get(method, {}), **options}


def _build(
    method: str, modules: list[nn.Module], options: dict[str, Any], config: PreTrainedConfig
) -> list[Attention]:
    """The attention of every module."""
    if "conv_kernel" in options and any(getattr(m, "conv", None) is not None for m in modules):
        raise ValueError(
            "conv_kernel must be left out for a model with a convolution of its own, "
            f"got {options['conv_kernel']}"
        )
    length = getattr(config, "max_position_embeddings", None)
    attentions = build(method, [_num_heads(module) for module in modules], options, length)
    for attention in attentions:
        if attention.conv is not None:
            # Trained weights know nothing of a convolution: it starts as if it were not there.
            nn.init.zeros_(attention.conv.weight)
    return attentions


def _num_heads(module: nn.Module) -> int:
    for owner in (module, getattr(module, "config", None)):
        for name in ("num_attention_heads", "num_heads", "n_heads"):
            if isinstance(heads := getattr(owner, name, None), int):
                return heads
    raise ValueError(
        f"model must name its number of heads, got a {type(module).__name__} that does not"
    )
