"""Tokenizers: trained on a corpus with the `tokenizers` library, or loaded."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # its threads are its own, not forked

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUES = "##"
DIFFICULT = "Café NAÏVE don't 3,141.59 well-known\t№ 汉字 <br /> a.b@c"


def train(texts: Iterable[str], vocab_size: int, *, lowercase: bool = True) -> Any:
    """A WordPiece tokenizer in the manner of BERT, as transformers' fast tokenizer.

    Pieces that are equally frequent may come in another order when it is trained again: keep it
    with what was tokenized with it.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        continuing_subword_prefix=CONTINUES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer_object=tokenizer)


def load(source: str | os.PathLike[str]) -> Any:
    """A tokenizer from `tokenizer.json`, BERT's `vocab.txt`, their folder, or a hub's name."""
    from transformers import AutoTokenizer

    path = Path(source)
    if (path / "tokenizer_config.json").is_file() or not path.exists():
        try:
            return AutoTokenizer.from_pretrained(str(source))
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"tokenizer must be a file, a folder or a name on the hub, got {str(source)!r}: "
                f"{str(error).splitlines()[0]}"
            ) from None
    for name in ("tokenizer.json", "vocab.txt"):
        if path.is_dir() and (path / name).is_file():
            path = path / name
    if path.name == "vocab.txt":
        return _from_vocabulary(path)
    if path.suffix != ".json":
        raise FileNotFoundError(
            f"tokenizer must be tokenizer.json or vocab.txt or a folder of one, got {path}"
        )
    try:
        return _wrap(tokenizer_file=str(path))
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        raise ValueError(
            f"tokenizer must be readable, got {path}: {error}; train it again"
        ) from None


def _from_vocabulary(path: Path) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece.from_file(str(path), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    return _wrap(tokenizer_object=tokenizer)


def _wrap(**source: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    pad, unk, cls, sep, mask = SPECIAL
    return PreTrainedTokenizerFast(
        **source, pad_token=pad, unk_token=unk, cls_token=cls, sep_token=sep, mask_token=mask
    )


def needs(tokenizer: Any) -> Any:
    """The tokenizer, if it has all that tasks need of one."""
    for name in ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id"):
        if getattr(tokenizer, name) is None:
            raise ValueError(f"tokenizer must have a {name.removesuffix('_id')}, got none")
    return tokenizer


def fingerprint(tokenizer: Any) -> str:
    """A name for what a tokenizer does: its vocabulary, and what it makes of a difficult text."""
    does = sorted(tokenizer.get_vocab().items()), tokenizer.encode(DIFFICULT)
    return hashlib.sha256(json.dumps(does).encode()).hexdigest()[:16]


def ordinary(tokenizer: Any) -> NDArray[np.int64]:
    """The ids that are no special tokens."""
    special = set(tokenizer.all_special_ids)
    return np.array([i for i in range(len(tokenizer)) if i not in special], np.int64)


def continues(tokenizer: Any) -> NDArray[np.bool_]:
    """(V,) whether an id continues a word: "##" in WordPiece, no leading space elsewhere."""
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    special = set(tokenizer.all_special_ids)
    if any(token.startswith(CONTINUES) for token in tokens):
        return np.array([token.startswith(CONTINUES) for token in tokens])
    return np.array([i not in special and token[:1] not in "Ġ▁" for i, token in enumerate(tokens)])


def sentence_ends(tokenizer: Any) -> NDArray[np.int64]:
    """The ids of . ! and ?, as they stand after a word."""
    ends = {tokenizer.encode(f"a{mark}", add_special_tokens=False)[-1] for mark in ".!?"}
    return np.array(sorted(ends - {tokenizer.unk_token_id}), np.int64)
