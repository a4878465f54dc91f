"""What Nyström's landmarks and Linformer's E do, in pictures.

    python examples/landmarks_and_projections.py         # writes landmarks.png, projections.png

Nyström goes from a query to a key through landmarks, means of runs of tokens: the pictures show
how much each query leans on each landmark, and the attention map that comes of it. Linformer's E
and F start as noise; here they are trained to give exact attention's output on documents drawn
afresh in each step. Rows of F, for values, become means over the paragraphs; E, for keys, stays
noisier: whatever mixture tells the paragraphs apart will do.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure

import longspan

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--output", type=Path, default=Path())
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
args.output.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)
TOKENS, CHANNELS, PARAGRAPHS, PROJECTED = 192, 32, 6, 12


def documents(batch: int) -> torch.Tensor:
    """Queries, keys and values (3, B, 1, N, D): paragraphs of one length, topics at random."""
    topics = torch.randn(batch, PARAGRAPHS, CHANNELS).repeat_interleave(TOKENS // PARAGRAPHS, 1)
    return (topics + 0.7 * torch.randn(3, batch, TOKENS, CHANNELS))[:, :, None]


def draw(name: str, panels: dict[str, torch.Tensor], x: str, y: str) -> None:
    """Matrices side by side, from white to blue."""
    figure = Figure(figsize=(3.5 * len(panels), 3.7), layout="constrained")
    for axes, (title, matrix) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        matrix = matrix.abs().numpy()
        high = np.quantile(matrix, 0.995)
        axes.imshow(matrix, "Blues", vmin=0, vmax=high, aspect="auto", interpolation="nearest")
        axes.set_title(title, loc="left", fontsize=10)
        axes.set(xlabel=x, ylabel=y)
    figure.savefig(args.output / name, dpi=110)


q, k, v = documents(1)
identity = torch.eye(TOKENS)[None, None]  # whose attention is the map itself
exact = longspan.softmax(q, k, identity)[0, 0]
panels = {"softmax": exact}
for m in (6, 24):
    found = longspan.nystrom(q, k, identity, num_landmarks=m)[0, 0]
    panels[f"nystrom, {m} landmarks"] = found
    print(
        f"nystrom, {m:>2} landmarks: error of the map {(found - exact).norm() / exact.norm():.3f}"
    )
landmarks = k[0, 0].unflatten(0, (24, -1)).mean(1)  # means of eight tokens
lean = (q[0, 0] @ landmarks.mT * CHANNELS**-0.5).softmax(-1)
panels["query by landmark (24)"] = lean.repeat_interleave(TOKENS // 24, 1)
draw("landmarks.png", panels, "key", "query")

linformer = longspan.LinformerAttention(1, max_length=TOKENS, projected_length=PROJECTED)
e = linformer.key_projection.matrix(TOKENS)
panels = {"E before": e.detach().clone()}
optimizer = torch.optim.Adam(linformer.parameters(), lr=3e-3)
for step in range(args.steps):
    q, k, v = documents(16)
    wanted = longspan.softmax(q, k, v)
    error = (linformer(q, k, v) - wanted).square().sum() / wanted.square().sum()
    if step in (0, args.steps - 1):
        print(f"linformer, step {step + 1:>3}: error of the output {error.detach().sqrt():.3f}")
    optimizer.zero_grad()
    error.backward()
    optimizer.step()
for name, projection in (("E", linformer.key_projection), ("F", linformer.value_projection)):
    panels[f"{name} after {args.steps} steps"] = projection.matrix(TOKENS).detach()
draw("projections.png", panels, "token", f"row of {PROJECTED}")
print(f"Wrote landmarks.png and projections.png to {args.output.resolve()}")
