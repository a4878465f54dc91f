"""The Long Range Arena's settings, as fields of a recipe.

Wisconsin's (the released code of Nyströmformer and YOSO) for every method alike: two layers of 64
channels and two heads, pre-norm, AdamW at 1e-4, linear warm-up and decay (in their protocol by
`OneCycleLR`, which moves β₁, too), no clipping, the weights of the best evaluation. Google's are
those of the arena's own configurations.
"""

from __future__ import annotations

import math
from typing import Any

from longspan.attention import checks
from longspan.tasks.lra.sets import PROTOCOLS, SETS

STEPS = {"listops": 5_000, "text": 20_000, "retrieval": 30_000, "image": 35_000,
         "pathfinder": 62_400}  # fmt: skip
WARMUP = {"listops": 1_000, "text": 8_000, "retrieval": 800, "image": 175, "pathfinder": 312}
EVALUATE_EVERY = {"listops": 50, "text": 500, "retrieval": 300, "image": 175, "pathfinder": 312}
EVALUATIONS = {"listops": 20, "text": 40, "retrieval": 20, "image": 20, "pathfinder": 20}  # ours
EVALUATION_TOKENS = 2**19  # of a step without gradients

# Layers, channels, heads and channels of the perceptron; queries are as wide as embeddings, which
# in the original they are not for pictures.
GOOGLE_SIZES = {"listops": (4, 512, 8, 1024), "text": (4, 256, 4, 1024),
                "retrieval": (4, 128, 4, 512), "image": (1, 128, 8, 128),
                "pathfinder": (4, 32, 4, 32)}  # fmt: skip
GOOGLE: dict[str, dict[str, Any]] = {
    "listops": dict(steps=5_000, warmup=1_000, learning_rate=0.05 / 1_000**0.5),
    "text": dict(steps=20_000, warmup=8_000, learning_rate=0.05 / 8_000**0.5),
    "retrieval": dict(steps=5_000, warmup=8_000, learning_rate=0.05 / 8_000**0.5),
    "image": dict(learning_rate=5e-4, schedule="cosine"),
    "pathfinder": dict(batch=512, learning_rate=1e-3, schedule="cosine"),
}


def fields(
    method: str, task: str, *, length: int | None = None, protocol: str = "longspan"
) -> dict[str, Any]:
    """Fields of `Recipe` for a task of the arena, sizes of the model included."""
    checks.choice("protocol", protocol, PROTOCOLS)
    name = task.partition("/")[2]
    family = name.partition("-")[0]  # retrieval-wiki is run like retrieval
    row = SETS[name]
    length = length or row.padded
    steps = STEPS[family]
    made: dict[str, Any] = dict(
        length=length,
        batch=row.batch,
        learning_rate=1e-4,
        steps=steps,
        warmup=WARMUP[family],
        weight_decay=0.0,
        adam_epsilon=1e-6,
        clip=0.0,
    )
    layers, channels, heads, inner = 2, 64, 2, 128
    if protocol == "google":
        layers, channels, heads, inner = GOOGLE_SIZES[family]
        made |= dict(schedule="inverse_sqrt", weight_decay=0.1, adam_beta2=0.98, adam_epsilon=1e-9)
        made |= GOOGLE[family]
    if protocol == "wisconsin":
        made["schedule"] = "one_cycle"
    published = protocol != "longspan"
    own_every = made["steps"] // EVALUATIONS[family]
    return made | dict(
        evaluate_every=EVALUATE_EVERY[family] if published else own_every,
        save_every=own_every,
        evaluation_batch=max(1, EVALUATION_TOKENS // length),
        keep_best=True,
        config=dict(
            num_hidden_layers=layers,
            hidden_size=channels,
            num_attention_heads=heads,
            intermediate_size=inner,
            max_position_embeddings=length,
            type_vocab_size=1,
            norm="pre",
            # The deviation of torch's own start, uniform up to 1/√channels, but for embeddings,
            # which are learned the faster for being small. With them normalised and as large, exact
            # and window attention did not find ListOps' outermost operator in 5,000 steps.
            initializer_range=(3 * channels) ** -0.5,
            embedding_range=0.02,
            embedding_norm=False,
            # Linformer had 1.6 points less on Text without these three; docs/lra.md says how sure
            # that is.
            classifier_size=inner,
            classifier_act="relu",
            classifier_dropout=0.0,
            activation_dropout=0.1 if published else 0.0,
        ),
        options=options(method, length),
        data=dict(protocol=protocol, group_lengths=not published),
    )


def options(method: str, length: int) -> dict[str, Any]:
    """Published options; hashes have log2 of the length bits, Nyström has its convolution, and
    Linformer one projection for keys, values and all layers."""
    bits = max(1, round(math.log2(length)))
    published: dict[str, dict[str, Any]] = {
        "yoso": {"num_hashes": 32, "hash_bits": bits, "exact_below": 0},
        "yoso_expectation": {"hash_bits": bits},
        "nystrom": {"num_landmarks": 128, "conv_kernel": 35},
        "linformer": {"projected_length": min(256, length), "sharing": "layerwise"},
        "window": {"window": 128},
        "reformer": {"num_hashes": 2},
    }
    return published.get(method, {})
