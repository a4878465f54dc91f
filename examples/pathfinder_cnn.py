"""Can the labels of the generated Pathfinder pictures be seen? A small CNN tries.

    python examples/pathfinder_cnn.py --data-dir data      # generates the set if it is not there

A model that reads pixels in a row may stay at 50 % for long. A net that looks at neighbours tells
whether that is the fault of the model or of the data.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

from longspan.tasks.lra import sets

SIDE = 32


class Block(nn.Sequential):
    """Layers whose result is added to what came in."""

    def forward(self, x):
        """The sum, where it is positive."""
        return torch.relu(x + super().forward(x))


def layer(c, to, stride=1):
    """A convolution of 3 × 3."""
    return [nn.Conv2d(c, to, 3, stride, 1, bias=False), nn.BatchNorm2d(to), nn.ReLU()]


def net(c):
    """Fifteen convolutions, in three steps of half the size and twice the width."""
    layers = layer(1, c)
    for width in (c, 2 * c, 4 * c):
        layers += layer(width // 2, width, 2) if width > c else []
        layers += [Block(*layer(width, width), *layer(width, width)[:2]) for _ in range(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * c, 2))


def pictures(split):
    """Pixels (N, 1, 32, 32) as bytes, and labels."""
    at = split.starts[split.rows[:, 0]][:, None] + torch.arange(SIDE * SIDE)
    return split.data[at].view(-1, 1, SIDE, SIDE), split.labels.long()


@torch.inference_mode()
@torch.autocast("cpu", torch.bfloat16)
def score(model, x, y):
    """The share of right answers."""
    guesses = torch.cat([model.eval()(part / 255).argmax(1) for part in x.split(1000)])
    return (guesses == y).double().mean().item()


def main():
    """Train, and say how many test pictures are told."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=Path("data"))
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    (x, y), held_out, test = map(pictures, sets.prepare("pathfinder", given.data_dir).values())
    torch.manual_seed(0)
    model = net(16).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(given.epochs):
        for rows in torch.randperm(len(x)).split(128):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model.train()(x[rows] / 255), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: {score(model, *held_out):.1%} of validation", flush=True)
    print(f"{score(model, *test):.1%} of the test pictures")


if __name__ == "__main__":
    main()
