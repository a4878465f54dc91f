"""ListOps' trees (Nangia & Bowman 2018), with the Long Range Arena's sizes, grown side by side.

A node is an operator with probability ¼ (never at depth 10), else a digit; an operator has two to
ten arguments and is MIN, MAX, MED or SM (sum modulo 10). A tree counts one for a digit and two for
an operator, and is kept if it counts more than 500 and less than 2,000.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SYMBOLS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
MIN, MAX, MED, SM, CLOSE = range(10, 15)
OPERATOR = 0.25
ARGUMENTS = 2, 10
DEPTH = 10
SHORTEST, LONGEST = 501, 1999
POOL = 4096


def value(operator: NDArray, counts: NDArray) -> NDArray:
    """Apply operators (n,) to arguments given as how often each digit occurs (n, 10)."""
    there = counts > 0
    digits = np.arange(10)
    below = counts.cumsum(-1)
    number = below[:, -1:]
    # The two middle ones, which are the same where the number is odd; the mean is cut to a digit.
    middle = ((below <= (number - 1) // 2).sum(-1) + (below <= number // 2).sum(-1)) // 2
    results = there.argmax(-1), 9 - there[:, ::-1].argmax(-1), middle, (counts @ digits) % 10
    return np.select([operator == name for name in (MIN, MAX, MED, SM)], results)


def grow(rng: np.random.Generator, count: int) -> tuple[list[bytes], list[int]]:
    """Grow `count` trees that are kept: their symbols, and their values."""
    trees: list[bytes] = []
    values: list[int] = []
    while len(trees) < count:
        for tree, result in _pool(rng):
            trees.append(tree)
            values.append(result)
    return trees[:count], values[:count]


def _pool(rng: np.random.Generator) -> list[tuple[bytes, int]]:
    """Grow trees whose root is an operator (others are too short), a symbol at a time.

    A stack of open operators for each: how many arguments are missing, and which have been seen.
    """
    operator = np.zeros((POOL, DEPTH), np.int64)
    missing = np.zeros((POOL, DEPTH), np.int64)
    counts = np.zeros((POOL, DEPTH, 10), np.int16)
    text = np.zeros((POOL, LONGEST), np.uint8)
    result, length = np.zeros(POOL, np.int64), np.zeros(POOL, np.int64)
    top = np.zeros(POOL, np.int64)
    missing[:, 0] = rng.integers(ARGUMENTS[0], ARGUMENTS[1] + 1, POOL)
    operator[:, 0] = text[:, 0] = rng.integers(MIN, SM + 1, POOL)
    alive = np.arange(POOL)
    for place in range(1, LONGEST):
        level = top[alive]
        full = missing[alive, level] == 0

        tree, at = alive[full], level[full]
        seen = value(operator[tree, at], counts[tree, at])
        text[tree, place] = CLOSE
        top[tree] = at - 1
        done = at == 0
        result[tree[done]], length[tree[done]] = seen[done], place + 1
        tree, at, seen = tree[~done], at[~done] - 1, seen[~done]
        counts[tree, at, seen] += 1

        tree, at = alive[~full], level[~full]
        missing[tree, at] -= 1
        # The root has depth 1 and level 0, the argument of an operator depth `level` + 2.
        nested = (rng.random(len(tree)) < OPERATOR) & (at + 2 < DEPTH)
        digit = rng.integers(0, 10, len(tree))
        name = rng.integers(MIN, SM + 1, len(tree))
        arguments = rng.integers(ARGUMENTS[0], ARGUMENTS[1] + 1, len(tree))
        text[tree, place] = np.where(nested, name, digit)
        leaf = tree[~nested]
        counts[leaf, at[~nested], digit[~nested]] += 1
        tree, at = tree[nested], at[nested] + 1
        top[tree], operator[tree, at] = at, name[nested]
        missing[tree, at], counts[tree, at] = arguments[nested], 0

        alive = alive[top[alive] >= 0]
    kept = np.flatnonzero(length >= SHORTEST)
    return [(text[i, : length[i]].tobytes(), int(result[i])) for i in kept]
