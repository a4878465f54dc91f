"""The demo's task, *topics*: find paragraphs in a long document and say what they are about.

A document is a row of tokens, each a pair (topic, word). It consists of contiguous paragraphs,
one per topic, in random order and of random lengths. Every paragraph has a favourite word, which
it uses for three quarters of its tokens; the others are words drawn at random. Before the
paragraphs stand the questions, one token per topic in random order, which carry the word "?"; the
label of each is the favourite word of that topic's paragraph.

    (2, ?) (5, ?) …  (5, fox) (5, owl) (5, fox) …  (2, elk) (2, bee) (2, elk) …  →  elk, fox, …

An answer can be anywhere in the document, so a question has to look everywhere, and to look by
content: attention that sees only its neighbourhood is left with guessing, at 1 / `NUM_WORDS`,
wherever the paragraph is out of its sight. Documents differ in length and are padded to a common
one, as in any real batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NUM_TOPICS = 8
NUM_WORDS = 8
QUESTION = NUM_WORDS
FAVOURITE_SHARE = 0.75
MIN_LENGTH = 16 * NUM_TOPICS


class Documents(NamedTuple):
    """A padded batch: tokens as (topics, words), padding (True = not a token), and labels."""

    topics: Tensor  # (B, N) in 0 … NUM_TOPICS - 1
    words: Tensor  # (B, N) in 0 … NUM_WORDS - 1; QUESTION for the first NUM_TOPICS tokens
    padding: Tensor  # (B, N) boolean
    labels: Tensor  # (B, NUM_TOPICS) in 0 … NUM_WORDS - 1, one for each question


def documents(batch: int, length: int, generator: torch.Generator) -> Documents:
    """Draw `batch` documents of `length`/2 to `length` tokens; the same generator, the same text.

    Raises `ValueError` for a length that leaves no room for paragraphs.
    """
    if length < MIN_LENGTH:
        raise ValueError(f"length must be at least {MIN_LENGTH}, got {length}")
    positions = torch.arange(length)
    lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)

    # Paragraphs fill what the questions leave, and differ in length by up to three times.
    sizes = 0.5 + torch.rand(batch, NUM_TOPICS, generator=generator)
    share = sizes.cumsum(1) / sizes.sum(1, keepdim=True)
    starts = NUM_TOPICS + share[:, :-1] * (lengths - NUM_TOPICS)  # of the second and later ones
    paragraph = (positions >= starts[..., None]).sum(1)  # (B, N)
    topics = _permutations(batch, generator).gather(1, paragraph)

    favourites = torch.randint(NUM_WORDS, (batch, NUM_TOPICS), generator=generator)  # by topic
    words = torch.randint(NUM_WORDS, (batch, length), generator=generator)
    keen = torch.rand(batch, length, generator=generator) < FAVOURITE_SHARE
    words = torch.where(keen, favourites.gather(1, topics), words)

    asked = _permutations(batch, generator)
    topics[:, :NUM_TOPICS] = asked
    words[:, :NUM_TOPICS] = QUESTION
    return Documents(topics, words, positions >= lengths, favourites.gather(1, asked))


def _permutations(batch: int, generator: torch.Generator) -> Tensor:
    return torch.rand(batch, NUM_TOPICS, generator=generator).argsort(1)
