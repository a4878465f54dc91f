"""What YOSO does, in pictures: how full its buckets are, and the attention map it implies.

    python examples/yoso_maps.py                  # writes yoso-maps.png and yoso-buckets.png here
    python examples/yoso_maps.py --output docs

The map of any attention is its output for values that are the identity matrix: row i then holds
the weights of query i. YOSO's is the share of hashes in which query and key fall into one bucket;
with more of them it comes nearer to its expectation, with an error that falls as 1/√num_hashes.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

import longspan
from longspan.attention.yoso.hashing import hash_codes, projections

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--output", type=Path, default=Path())
args = parser.parse_args()
args.output.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
TOKENS, CHANNELS, BITS, HASHES = 192, 32, 8, (2, 8, 32, 128)


def document(noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys (1, 1, N, D) of a text of six paragraphs, each about a topic of its own."""
    topics = torch.randn(6, CHANNELS).repeat_interleave(TOKENS // 6, 0)
    return tuple((topics + noise * torch.randn(2, TOKENS, CHANNELS))[:, None, None])


q, k = document(noise=0.7)
identity = torch.eye(TOKENS)[None, None]
raw = dict(hash_bits=BITS, normalize=False)  # without the final scaling of rows to length one
limit = longspan.yoso_expectation(q, k, identity, **raw)[0, 0]
maps = {"softmax": longspan.softmax(q, k, identity)[0, 0], "yoso's expectation": limit}
print(f"{TOKENS} tokens, {BITS}-bit hashes: error of the map against yoso's expectation")
for m in HASHES:
    found = longspan.yoso(q, k, identity, num_hashes=m, seed=0, **raw)[0, 0]
    maps[f"yoso, {m} hashes"] = found
    print(f"{m:>5} hashes: {(found - limit).norm() / limit.norm():.3f}")

figure = Figure(figsize=(10.5, 6.8), layout="constrained")
for axes, (name, weights) in zip(figure.subplots(2, 3).flat, maps.items(), strict=True):
    axes.imshow(weights.numpy(), "Blues", vmin=0, vmax=float(weights.quantile(0.99)))
    axes.set_title(name, loc="left", fontsize=11)
    axes.set(xlabel="key", ylabel="query")
figure.savefig(args.output / "yoso-maps.png", dpi=110)

figure = Figure(figsize=(10.5, 3.4), layout="constrained")
panels = figure.subplots(1, 3, sharey=True)
print(f"keys in the fullest of {1 << BITS} buckets, mean over {HASHES[-1]} hashes")
for axes, (name, noise) in zip(
    panels, {"topics far apart": 0.2, "as above": 0.7, "no topics to see": 5.0}.items(), strict=True
):
    _, keys = document(noise)
    planes = projections("gaussian", torch.tensor(0), 1, CHANNELS, HASHES[-1], BITS, keys.device)
    codes = hash_codes(keys, planes)[0, 0].long()  # (num_hashes, N)
    sizes = torch.zeros(HASHES[-1], 1 << BITS).scatter_add_(1, codes, torch.ones(codes.shape))
    fullest = sizes.sort(descending=True).values.mean(0)
    axes.bar(range(40), fullest[:40].tolist(), color="#d55e00")
    axes.set_title(f"{name} (noise {noise})", loc="left", fontsize=11)
    axes.set_xlabel("buckets, the fullest first")
    print(f"{name:>18}: {fullest[0]:.0f}")
panels[0].set_ylabel("keys in a bucket")
figure.savefig(args.output / "yoso-buckets.png", dpi=110)
print(f"Wrote yoso-maps.png and yoso-buckets.png to {args.output.resolve()}")
