"""One line turns a BERT or ModernBERT into a long-sequence encoder.

    python examples/convert_encoder.py                # BERT- and ModernBERT-shaped, random weights
    python examples/convert_encoder.py my/checkpoint  # any encoder of the hub, or a folder

Positions are extended where they are learned; then one long sequence is timed before and after, and
a padded batch is compared with its sequences alone. `--tiny` runs it all in seconds.
"""

import argparse
import time

import torch
from transformers import AutoConfig, AutoModel, BertConfig, ModernBertConfig, PreTrainedModel

import longspan

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("checkpoint", nargs="*")
parser.add_argument("--method", default="nystrom")
parser.add_argument("--length", type=int, default=4096)
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()


def models() -> list[PreTrainedModel]:
    """Those named, or two shapes with random weights."""
    if args.checkpoint:
        return [AutoModel.from_pretrained(name).eval() for name in args.checkpoint]
    small = dict(hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=500)
    common = {"num_hidden_layers": 4, "pad_token_id": 0, **(small if args.tiny else {})}
    configs: list[AutoConfig] = [BertConfig(**common), ModernBertConfig(**common)]
    return [AutoModel.from_config(config).eval() for config in configs]


@torch.no_grad()
def seconds(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """The better of two forward passes."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        model(ids)
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()
def padding_error(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """The largest difference between a sequence alone and the same one padded in a batch."""
    short = ids.shape[1] // 3
    mask = torch.ones(2, ids.shape[1], dtype=torch.long)
    mask[1, short:] = 0
    padded = model(ids.expand(2, -1), attention_mask=mask).last_hidden_state[1, :short]
    alone = model(ids[:, :short]).last_hidden_state[0]
    return float((padded - alone).abs().max())


torch.manual_seed(0)
length = 600 if args.tiny else args.length
for model in models():
    if model.config.model_type != "modernbert":  # rotary positions go on forever
        longspan.extend_positions(model, length)
    ids = torch.randint(5, model.config.vocab_size, (1, length))
    before = seconds(model, ids)
    longspan.convert(model, args.method)
    after = seconds(model, ids)
    print(
        f"{type(model).__name__} at {length} tokens: {before:.2f} s exact, {after:.2f} s converted"
    )
    print(f"  a padded batch differs from its sequences alone by {padding_error(model, ids):.0e}")
