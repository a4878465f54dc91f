"""Pathfinder's pictures: two dashed paths, distractors, two discs, drawn many at a time.

The task of Linsley et al. (2018) with the Long Range Arena's settings for 32 × 32 pixels, written
from a description of the original generator, quirks included. Everything a dash can be is in
tables: a seed points in one of 360 whole degrees, every later dash to one of the few pixels on a
circle, so drawing is looking up 9 × 9 patches and growing paths is arithmetic on places.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SIZE = 32
DASH, MARGIN, SCALE = 2, 1, 2  # pixels of a dash, between dashes; antialiasing
SEED_DISTANCE = 7
TARGET_INK, DISTRACTOR_INK = 1.5, 2.0  # the original dims the paths, not the distractors
DISTRACTOR_DASHES = 20  # over all distractors of a picture
DRAWS, ATTEMPTS = 3, 5  # of a dash, of a distractor
FREE, FULL, LIMIT = 0.3, 0.01, 1.8  # of occupancy: free pixel, share of them, two dashes in one
REACH = 4  # pixels from the centre of a patch to its edge
PAD = SIZE + 2 * REACH + 2  # canvas with room for patches that stick out
POOL = 4096  # pairs grown side by side

Ints = NDArray[np.int64]


class Tables(NamedTuple):
    """What a dash looks like and where the next may go, by direction: 360 seeds, then circle."""

    ink: NDArray[np.float32]  # (directions, 81) in 0…1
    blocked: NDArray[np.int16]  # (directions, 81) in 0…255: what others may not touch
    head: Ints  # (360, 2) from a seed's tail to its head
    pivot: Ints  # (360, 2) from a seed's tail to its pivot
    onwards: Ints  # (directions, 2) from a pivot to the next
    circle: Ints  # (candidates, 2) pixels around a pivot
    weight: NDArray[np.float64]  # (directions, candidates) preference for going straight
    kernel: NDArray[np.bool_]  # (360, 7, 7) what a seed's dash covers
    usable: Ints  # directions a seed can have, in degrees
    disc: NDArray[np.float32]  # (9, 9) a marker


def _step(degrees: float, distance: float, start: int = SIZE // 2) -> tuple[int, int]:
    """Rows and columns of a move, rounded up; `start` matters where a sum is nearly whole."""
    angle = math.radians(degrees)
    rows, columns = (
        math.ceil(start + distance * part) - start for part in (math.sin(angle), math.cos(angle))
    )
    return rows, columns


def _patch(degrees: float) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A dash from the centre of a 9 × 9 patch, and the same thickened by the margin."""
    from PIL import Image, ImageDraw

    side = 2 * SCALE * REACH + 1  # 17
    middle = side // 2
    line = Image.new("L", (side, side))
    rows, columns = _step(degrees, SCALE * DASH, middle)
    ends = [(middle, middle), (middle + columns, middle + rows)]
    ImageDraw.Draw(line).line(ends, fill=255, width=1)
    drawn = np.asarray(line)
    radius = SCALE * MARGIN
    thick = np.zeros_like(drawn)
    wide = np.pad(drawn, radius)
    for i in range(-radius, radius + 1):
        for j in range(-radius, radius + 1):
            if i * i + j * j <= radius * radius:
                moved = wide[radius + i : radius + i + side, radius + j : radius + j + side]
                thick = np.maximum(thick, moved)
    small = [
        np.asarray(Image.fromarray(x).resize((9, 9), Image.Resampling.LANCZOS))
        for x in (drawn, thick)
    ]
    return small[0], small[1]


def _disc() -> NDArray[np.float32]:
    """A marker: a disc of radius 1.5 pixels."""
    from PIL import Image

    place = np.arange(2 * SIZE) - SIZE
    large = np.where(place[:, None] ** 2 + place**2 <= 9, 255, 0).astype(np.uint8)
    small = Image.fromarray(large).resize((SIZE, SIZE), Image.Resampling.LANCZOS)
    middle = slice(SIZE // 2 - REACH, SIZE // 2 + REACH + 1)
    return np.asarray(small)[middle, middle].astype(np.float32) / np.float32(255)


def _survives(kernel: NDArray[np.bool_]) -> bool:
    """Whether a dilation with this kernel reads inside the image from every pixel.

    The original reads −∞ outside, and gives the attempt up if any result is −∞.
    """
    inside = np.pad(np.ones((SIZE, SIZE), bool), 3)
    windows = np.lib.stride_tricks.sliding_window_view(inside, (7, 7))
    return bool((windows & kernel).any((2, 3)).all())


@functools.cache
def tables() -> Tables:
    """Build the tables, once."""
    reach = DASH + MARGIN
    count = math.ceil(2 * math.pi * reach)  # steps of 360/(2π · 3) degrees
    angles = [math.radians(i * 360 / (2 * math.pi * reach)) for i in range(count)]
    points = {(math.floor(reach * math.sin(a)), math.floor(reach * math.cos(a))) for a in angles}
    circle = np.array(sorted(points))
    towards = np.degrees(np.arctan2(circle[:, 0], circle[:, 1]))
    seeds = np.arange(360) - 180
    direction = np.concatenate([seeds, towards])
    # A seed is drawn from its tail onwards, a later dash from its far end backwards.
    drawn = np.concatenate([seeds, towards + 180])
    patches = [_patch(d) for d in drawn]
    ink, blocked = (np.stack(x).reshape(len(drawn), -1) for x in zip(*patches, strict=True))
    turn = np.abs((towards - direction[:, None] + 180) % 360 - 180)
    weight = np.maximum(np.cos(np.radians(np.minimum(turn, 90))), 0) ** 2
    kernel = blocked[:360].reshape(360, 9, 9)[:, :7, :7] == 255
    head = np.array([_step(float(d), DASH) for d in seeds])
    back = np.array([_step(float(d) + 180, reach) for d in seeds])
    return Tables(
        ink=(ink / 255).astype(np.float32),
        blocked=blocked.astype(np.int16),
        head=head,
        pivot=head + back,
        onwards=np.array([_step(d, DASH + 2 * MARGIN) for d in direction]),
        circle=circle,
        weight=weight,
        kernel=kernel,
        usable=np.flatnonzero([_survives(k) for k in kernel]) - 180,
        disc=_disc(),
    )


ORIGIN = REACH + 1
# Offsets in a canvas of the pixels of a patch, and of a pixel and its four neighbours.
PATCH = ((np.arange(9)[:, None] - REACH) * PAD + np.arange(9) - REACH).reshape(-1)
PLUS = np.array([0, -PAD, PAD, -1, 1])
INSIDE = np.pad(np.ones((SIZE, SIZE), bool), ORIGIN).reshape(-1)
EMPTY = np.zeros((PAD, PAD), np.int16)
EMPTY[ORIGIN:-ORIGIN, ORIGIN:-ORIGIN] = 255
EMPTY[ORIGIN + 1 : -ORIGIN - 1, ORIGIN + 1 : -ORIGIN - 1] = 0  # the outermost ring is taken


def flat(place: Ints) -> Ints:
    """Index in a canvas of pixels (…, 2)."""
    return (place[..., 0] + ORIGIN) * PAD + place[..., 1] + ORIGIN


@dataclass
class Paths:
    """Paths that grow side by side, each on its canvas of taken pixels.

    `pivot` (n, 2) and `direction` (n,) say where the next dash goes; `last` is the newest dash,
    which is not marked as taken until the next one is accepted; `dashes` all of them, as
    (place, direction), each (n,); `end` (n, 2) is the far end.
    """

    pivot: Ints
    direction: Ints
    last: tuple[Ints, Ints]
    dashes: list[tuple[Ints, Ints]]
    end: Ints

    @classmethod
    def seeded(cls, tail: Ints, degrees: Ints) -> Paths:
        """Start at `tail` with a dash in a direction of whole degrees."""
        direction = degrees + 180
        first = flat(tail), direction
        pivot = tail + tables().pivot[direction] + tables().onwards[direction]
        return cls(pivot, direction, first, [first], tail)

    def pick(self, some: NDArray) -> Paths:
        """Some of the paths."""
        dashes = [(place[some], direction[some]) for place, direction in self.dashes]
        return Paths(self.pivot[some], self.direction[some], dashes[-1], dashes, self.end[some])


def mark(taken: NDArray[np.int16], rows: Ints, dash: tuple[Ints, Ints]) -> None:
    """Mark a dash of each row as taken on its canvas, (n, PAD · PAD)."""
    place = dash[0][:, None] + PATCH
    at = rows[:, None], place
    taken[at] = np.maximum(taken[at], tables().blocked[dash[1]])


def extend(
    rng: np.random.Generator, paths: Paths, taken: NDArray[np.int16], rows: Ints
) -> tuple[Paths, Ints]:
    """Add a dash to each path, on the canvases `rows` of `taken`; those that can't are dropped.

    Returns the paths that are left, and which these are.
    """
    table = tables()
    around = paths.pivot[:, None] + table.circle  # (n, candidates, 2)
    inside = ((around >= 0) & (around < SIZE)).all(-1)
    place = flat(np.clip(around, 0, SIZE - 1))
    near = taken[rows[:, None, None], place[..., None] + PLUS].max(-1) / 255
    weight = table.weight[paths.direction] * (1 - near) * inside
    total = weight.sum(-1)
    chosen = np.full(len(rows), -1)
    left = np.flatnonzero(total >= 1e-4)
    share = weight.cumsum(-1)
    for _ in range(DRAWS):
        mark_at = rng.random(len(left)) * total[left]
        draw = (share[left] <= mark_at[:, None]).sum(-1).clip(max=weight.shape[1] - 1)
        pixels = place[left, draw][:, None] + PATCH
        both = taken[rows[left][:, None], pixels] + table.blocked[360 + draw]
        fits = (both * INSIDE[pixels]).max(-1) < LIMIT * 255
        chosen[left[fits]] = draw[fits]
        left = left[~fits]
    kept = np.flatnonzero(chosen >= 0)
    some, draw = paths.pick(kept), chosen[kept]
    mark(taken, rows[kept], some.last)
    dash = place[kept, draw], 360 + draw
    end = some.pivot + table.circle[draw]
    pivot = some.pivot + table.onwards[360 + draw]
    return Paths(pivot, 360 + draw, dash, [*some.dashes, dash], end), kept
