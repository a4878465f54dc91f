"""Pathfinder's pictures, whole: pairs of paths, distractors among them, discs at two ends."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.tasks.lra.paths import (
    ATTEMPTS,
    DISTRACTOR_DASHES,
    DISTRACTOR_INK,
    EMPTY,
    FREE,
    FULL,
    INSIDE,
    ORIGIN,
    PAD,
    PATCH,
    POOL,
    SEED_DISTANCE,
    SIZE,
    TARGET_INK,
    Ints,
    Paths,
    extend,
    flat,
    mark,
    tables,
)


class Pictures(NamedTuple):
    """Images with what they show."""

    images: NDArray[np.uint8]  # (n, 32, 32)
    labels: NDArray[np.uint8]  # (n,) 1: both discs lie at the ends of one path
    discs: Ints  # (n, 2, 2) their pixels
    ends: Ints  # (n, 2 paths, 2 ends, 2)
    distractors: Ints  # (n,) how many were placed


def draw(rng: np.random.Generator, count: int, length: int = 14) -> Pictures:
    """Draw pictures with paths of `length` dashes."""
    labels = rng.integers(0, 2, count)
    taken, first, second, starts = pairs(rng, count, length)
    canvas = np.zeros((count, PAD * PAD), np.float32)
    for path in (first, second):
        for dash in path.dashes:
            paint(canvas, np.arange(count), dash, TARGET_INK)
    placed = np.zeros(count, int)
    for _ in range(DISTRACTOR_DASHES // (length // 3)):
        placed += add_distractor(rng, canvas, taken, length // 3)
    ends = np.stack([starts, np.stack([first.end, second.end], 1)], 2)  # (n, path, end, 2)
    one = rng.integers(0, 2, count)
    other = np.where(labels == 1, one, 1 - one)
    rows = np.arange(count)
    discs = np.stack([ends[rows, one, 0], ends[rows, other, 1]], 1)
    for k in range(2):
        at = rows[:, None], flat(discs[:, k])[:, None] + PATCH
        canvas[at] = np.maximum(canvas[at], tables().disc.reshape(-1))
    image = canvas.reshape(count, PAD, PAD)[:, ORIGIN:-ORIGIN, ORIGIN:-ORIGIN]
    low, high = (f(image, axis=(1, 2), keepdims=True) for f in (np.min, np.max))
    scaled = np.rint((image - low) / (high - low) * 255).astype(np.uint8)
    return Pictures(scaled, labels.astype(np.uint8), discs, ends, placed)


def pairs(
    rng: np.random.Generator, count: int, length: int
) -> tuple[NDArray[np.int16], Paths, Paths, Ints]:
    """Grow pairs of paths until `count` of them have `length` dashes each.

    Returns their canvases of taken pixels, both paths, and the tails they started from (n, 2, 2).
    """
    found = [_grown(rng, POOL, length)]
    while sum(len(starts) for _, _, _, starts in found) < count:
        found.append(_grown(rng, POOL, length))
    taken, first, second, starts = zip(*found, strict=True)
    return (
        np.concatenate(taken)[:count],
        _join(first, count),
        _join(second, count),
        np.concatenate(starts)[:count],
    )


def _grown(
    rng: np.random.Generator, pool: int, length: int
) -> tuple[NDArray[np.int16], Paths, Paths, Ints]:
    """Grow `pool` pairs; those that run into something are given up, so few are left."""
    table = tables()
    # Directions that the original gives up at once are left out: the others are as likely.
    degrees = rng.choice(table.usable, pool)
    band = np.full((SIZE, SIZE), 255, np.int16)
    edge = 2 * SEED_DISTANCE
    band[edge:-edge, edge:-edge] = 0
    free = {d: np.argwhere(_dilated(band[None], d)[0] <= FREE * 255) for d in table.usable}
    tails = np.stack([free[d][rng.integers(len(free[d]))] for d in degrees])
    around = np.radians(rng.integers(0, 360, pool))
    apart = SEED_DISTANCE * np.stack([np.sin(around), np.cos(around)], -1)
    others = np.rint(tails + apart).astype(int)
    first = Paths.seeded(tails, degrees)
    second = Paths.seeded(others, rng.integers(-180, 180, pool))
    starts = np.stack([tails, others], 1)
    taken = np.repeat(EMPTY.reshape(1, -1), pool, 0)
    rows = np.arange(pool)
    for _ in range(length - 1):
        first, kept = extend(rng, first, taken, rows)
        second, rows = second.pick(kept), rows[kept]
        second, kept = extend(rng, second, taken, rows)
        first, rows = first.pick(kept), rows[kept]
    mark(taken, rows, second.last)  # the original leaves out the first path's last dash
    return taken[rows], first, second, starts[rows]


def _join(parts: tuple[Paths, ...], count: int) -> Paths:
    """One set of paths out of several, cut to `count`."""
    dashes = [
        tuple(np.concatenate(column)[:count] for column in zip(*dash, strict=True))
        for dash in zip(*(part.dashes for part in parts), strict=True)
    ]
    pivot, direction, end = (
        np.concatenate([getattr(part, name) for part in parts])[:count]
        for name in ("pivot", "direction", "end")
    )
    return Paths(pivot, direction, dashes[-1], dashes, end)  # type: ignore[arg-type]


def _dilated(taken: NDArray[np.int16], degrees: int) -> NDArray[np.int16]:
    """The largest value (n, 32, 32) that a seed's dash would meet from each pixel."""
    result = np.zeros_like(taken)
    wide = np.pad(taken, ((0, 0), (3, 3), (3, 3)))
    for i, j in np.argwhere(tables().kernel[degrees + 180]):
        np.maximum(result, wide[:, i : i + SIZE, j : j + SIZE], out=result)
    return result


def add_distractor(
    rng: np.random.Generator,
    canvas: NDArray[np.float32],
    taken: NDArray[np.int16],
    length: int,
) -> NDArray[np.bool_]:
    """Add one short path to each picture where it fits in a few attempts; says where it did."""
    placed = np.zeros(len(taken), bool)
    for _ in range(ATTEMPTS):
        rows = np.flatnonzero(~placed)
        free = ((taken[rows] <= FREE * 255) & INSIDE).sum(-1) / SIZE**2
        rows = rows[free >= FULL]
        tail, degrees, rows = _seeds(rng, taken, rows)
        paths = Paths.seeded(tail, degrees)
        own, there = taken[rows], np.arange(len(rows))
        for _ in range(length - 1):
            paths, kept = extend(rng, paths, own, there)
            there = there[kept]
        mark(own, there, paths.last)
        done = rows[there]
        taken[done], placed[done] = own[there], True
        for dash in paths.dashes:
            paint(canvas, done, dash, DISTRACTOR_INK)
    return placed


def _seeds(
    rng: np.random.Generator, taken: NDArray[np.int16], rows: Ints
) -> tuple[Ints, Ints, Ints]:
    """A tail and a direction for some of the canvases `rows`, and which."""
    table = tables()
    found: list[tuple[Ints, Ints, Ints]] = [(np.zeros((0, 2), int), rows[:0], rows[:0])]
    for _ in range(3):
        degrees = rng.integers(-180, 180, len(rows))
        some = np.isin(degrees, table.usable)
        rows, degrees = rows[some], degrees[some]
        again = []
        for d in np.unique(degrees):
            here = rows[degrees == d]
            inner = taken[here].reshape(-1, PAD, PAD)[:, ORIGIN:-ORIGIN, ORIGIN:-ORIGIN]
            free = (_dilated(inner, d) <= FREE * 255).reshape(len(here), -1)
            here, free = here[free.any(-1)], free[free.any(-1)]
            # The largest of random numbers on free pixels is on any of them alike.
            tail = np.stack(np.divmod((rng.random(free.shape) * free).argmax(-1), SIZE), -1)
            head = tail + table.head[d + 180]
            pivot = tail + table.pivot[d + 180]
            fits = ((head >= 0) & (head < SIZE) & (pivot >= 0) & (pivot < SIZE)).all(-1)
            found.append((tail[fits], np.full(fits.sum(), d), here[fits]))
            again.append(here[~fits])
        rows = np.concatenate([rows[:0], *again])
    tail, degrees, rows = (np.concatenate(x) for x in zip(*found, strict=True))
    return tail, degrees, rows


def paint(
    canvas: NDArray[np.float32], rows: Ints, dash: tuple[Ints, Ints], contrast: float
) -> None:
    """Draw a dash on each of some canvases; ink never darkens."""
    at = rows[:, None], dash[0][:, None] + PATCH
    canvas[at] = np.maximum(canvas[at], tables().ink[dash[1]] * contrast)
