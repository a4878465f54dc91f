"""Which method `attention(method="auto")` takes: exact, unless another is allowed and pays."""

import torch
from torch import Tensor

EXACT = "softmax"

# From how many keys on a method with its default options was faster than exact attention, for 8
# heads of 64: `longspan bench length` on two cores of an AMD EPYC (float32, results/cpu) and on an
# NVIDIA H200 (bfloat16, results/h200). None: not up to the longest length that was measured; 512
# is the shortest. A test reads the numbers off the rows; `longspan advise` measures them for your
# own machine and shape. What is not here was not measured, so only `exact_below` brings it in.
CROSSOVERS: dict[str, dict[str, dict[str, int | None]]] = {
    "cpu": {
        "forward": {
            "linformer": 512,
            "window": 590,
            "nystrom": 512,
            "yoso": 512,
            "yoso_expectation": None,
            "reformer": 2700,
            "strided": 870,
        },
        "forward+backward": {
            "linformer": 512,
            "window": 590,
            "nystrom": 512,
            "yoso": 512,
            "yoso_expectation": None,
            "reformer": 1800,
            "strided": 720,
        },
    },
    "cuda": {
        "forward": {
            "linformer": 1000,
            "window": 512,
            "nystrom": 1300,
            "yoso": 2600,
            "yoso_expectation": None,
            "reformer": None,
            "strided": None,
        },
        "forward+backward": {
            "linformer": 780,
            "window": 512,
            "nystrom": 1300,
            "yoso": 3300,
            "yoso_expectation": None,
            "reformer": None,
            "strided": None,
        },
    },
}


def choose(
    q: Tensor, k: Tensor, v: Tensor, approximate: str | None, exact_below: int | None
) -> str:
    """The name of the method to use: `approximate` from `exact_below` keys on, else exact.

    Without `exact_below` it is the measured crossover of the method on this kind of device, for
    inference or, where a gradient will be asked for, for training; where none was measured, exact
    attention is used at every length.
    """
    if approximate is None:
        return EXACT
    if exact_below is None:
        training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        mode = "forward+backward" if training else "forward"
        exact_below = CROSSOVERS.get(q.device.type, {}).get(mode, {}).get(approximate)
    return approximate if exact_below is not None and k.shape[2] >= exact_below else EXACT
