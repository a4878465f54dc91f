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
WIDTHS = (16, 16, 16, 32, 32, 32, 32, 64, 64, 64, 64)  # where they double, pictures shrink


def net():
    """Eleven convolutions of 3 × 3; a picture is what is largest anywhere in it."""
    layers, before = [], 1
    for width in WIDTHS:
        stride = 2 if width == 2 * before else 1
        layers += [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)]
        layers, before = [*layers, nn.ReLU()], width
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(before, 2))


def pictures(split):
    """Pixels (N, 1, 32, 32) as bytes, and labels."""
    at = split.starts[split.rows[:, 0]][:, None] + torch.arange(SIDE * SIDE)
    return split.data[at].view(-1, 1, SIDE, SIDE), split.labels.long()


@torch.autocast("cpu", torch.bfloat16)
def train(model, x, y, batch, optimizer, schedule):
    """Once through the pictures, as they are or turned over: a path stays a path."""
    model.train()
    for rows in torch.randperm(len(x))[: len(x) // batch * batch].split(batch):
        seen = x[rows]
        seen = [seen, seen.flip(2), seen.flip(3), seen.mT][torch.randint(4, ())]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(seen / 255), y[rows]).backward()
        optimizer.step()
        schedule.step()


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
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    (x, y), held_out, test = map(pictures, sets.prepare("pathfinder", given.data_dir).values())
    torch.manual_seed(0)
    batch, model = min(256, len(x)), net().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    steps = given.epochs * (len(x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for epoch in range(given.epochs):
        train(model, x, y, batch, optimizer, schedule)
        print(f"epoch {epoch + 1}: {score(model, *held_out):.1%} of validation", flush=True)
    print(f"{score(model, *test):.1%} of the test pictures")


if __name__ == "__main__":
    main()
