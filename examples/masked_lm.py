"""Fill a blank with a published Nyströmformer or YOSO, done right.

    python examples/masked_lm.py                                      # uw-madison/nystromformer-512
    python examples/masked_lm.py uw-madison/yoso-4096 "Paris is the <mask> of France."

Makes two models of it, a converted one of transformers and one of longspan, and prints the five
likeliest words of each, for the sentence alone and in a padded batch: all agree. Weights are read
from safetensors, or from a .bin without running anything in it; no code of a hub is run.
"""

import sys

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import longspan
import longspan.huggingface

name = sys.argv[1] if len(sys.argv) > 1 else "uw-madison/nystromformer-512"
sentence = sys.argv[2] if len(sys.argv) > 2 else None
try:
    tokenizer = AutoTokenizer.from_pretrained(name)
    original = AutoModelForMaskedLM.from_pretrained(name).eval()
except OSError as error:
    sys.exit(
        f"{name} is neither a folder nor within reach on the hub: {str(error).splitlines()[0]}"
    )

mask = tokenizer.mask_token
sentence = sentence or f"Paris is the {mask} of France."
ours = longspan.huggingface.from_transformers(original)
converted = longspan.convert(original)
padding = f"A much longer sentence, so that the {mask} one before it is padded in its batch."


@torch.no_grad()
def words(model: torch.nn.Module, texts: list[str]) -> list[str]:
    """The five likeliest words for the first blank of the first text."""
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[0]
    blank = (batch["input_ids"][0] == tokenizer.mask_token_id).nonzero()[0, 0]
    return [tokenizer.decode([i]).strip() for i in logits[blank].topk(5).indices.tolist()]


print(sentence)
for title, model in (("converted", converted), ("longspan", ours)):
    print(f"{title:<10} alone:  {', '.join(words(model, [sentence]))}")
    print(f"{title:<10} padded: {', '.join(words(model, [sentence, padding]))}")
