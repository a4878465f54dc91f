"""A vision transformer on large images: thousands of patches at linear cost.

    python examples/convert_vit.py                # ViT-B/16-shaped, random weights, 1024 × 1024
    python examples/convert_vit.py my/checkpoint  # any ViT of the hub, or a folder

Prints the time of a forward pass with exact attention and with each method, and the cosine between
the image's embedding with one and the other. `--tiny` runs it in seconds.
"""

import argparse
import time

import torch
from transformers import AutoModel, PreTrainedModel, ViTConfig, ViTModel

import longspan

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("checkpoint", nargs="?")
parser.add_argument("--size", type=int, default=1024)
parser.add_argument("--tiny", action="store_true")
args = parser.parse_args()


def vit() -> PreTrainedModel:
    """The model named, or a shape with random weights."""
    if args.checkpoint:
        return AutoModel.from_pretrained(args.checkpoint).eval()
    torch.manual_seed(0)
    if args.tiny:
        small = dict(hidden_size=32, num_attention_heads=4, intermediate_size=64, patch_size=4)
        return ViTModel(ViTConfig(num_hidden_layers=2, image_size=64, **small)).eval()
    return ViTModel(ViTConfig(num_hidden_layers=4)).eval()


@torch.no_grad()
def embed(model: PreTrainedModel, pixels: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The first token's state, and the seconds it took."""
    start = time.perf_counter()
    # Positions are a grid, which transformers itself stretches to larger images.
    state = model(pixels, interpolate_pos_encoding=True).last_hidden_state[0, 0]
    return state, time.perf_counter() - start


model = vit()
size = 80 if args.tiny else args.size
pixels = torch.rand(1, 3, size, size)
exact, before = embed(model, pixels)
patches = (size // model.config.patch_size) ** 2
print(f"{patches} patches: {before:.2f} s with exact attention")
for method, options in (("nystrom", {"num_landmarks": 64}), ("yoso", {}), ("window", {})):
    longspan.convert(model, method, **options)
    state, after = embed(model, pixels)
    cosine = torch.cosine_similarity(exact, state, dim=0)
    print(f"{method:<8} {after:6.2f} s, cosine of the embeddings {cosine:.4f}")
