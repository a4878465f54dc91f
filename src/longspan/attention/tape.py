"""The launches of a call, recorded once and played again on other tensors.

Which kernels an op launches, with which numbers and on which buffers, follows from the shapes,
strides and types of its tensors and from its options. Finding that out takes the host longer than a
GPU needs for a few thousand tokens. To play it again takes one allocation for all buffers that are
no results, the addresses of what is new, and on a GPU one launch of a graph of all kernels.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.attention.launch import Again, Chain, Place

OTHERS = (int, float, bool, type(None))  # asking whether something is a tensor takes longer
MOST = 256  # kinds of calls of an op that are remembered
WORD = 512  # bytes that buffers begin on, as torch's own do
_local = threading.local()


class Number(int):
    """An argument that is no part of a call's kind: recorded with one, played with any."""


Given = Any  # a Tensor or a Number
Results = tuple[Tensor, ...] | list[Tensor]
Play = Callable[[Sequence[Given], Sequence[int]], None]  # takes bases and their addresses


class Launchable(Protocol):
    """A kernel that can be launched again, with places for the tensors among its arguments."""

    def again(self, grid: int, arguments: Sequence[Any]) -> Play:
        """What launches it on bases."""


class Spot(NamedTuple):
    """Of a tensor while it is recorded: given, or a buffer, by number; bytes behind its begin."""

    given: bool
    number: int
    offset: int
    like: Any


NOWHERE = object()


class Recorder(TorchDispatchMode):
    """Sees the launches of a call, its buffers, and whether torch itself computes something."""

    def __init__(self, given: Sequence[Given]) -> None:
        super().__init__()
        numbered = list(enumerate(given))
        self.given = {x.data_ptr(): i for i, x in reversed(numbered) if type(x) is not Number}
        self.numbers = {id(x): i for i, x in numbered if type(x) is Number}
        self.launches: list[tuple[Launchable, int, list[Any]]] = []
        self.buffers: list[tuple[int, int]] = []  # address and bytes; addresses are used again
        self.alone, self.looks = True, True

    def __enter__(self) -> "Recorder":
        _local.recorder = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        _local.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An op of torch: makes a buffer, looks at a part of one, or computes."""
        result = op(*args, **(kwargs or {}))
        if not self.looks:
            return result
        if "empty" in op.overloadpacket.__name__:
            self.buffers.append((result.data_ptr(), _bytes(result)))
        elif not op.is_view:
            self.alone = False
        return result

    def find(self, x: Any) -> Any:
        """Where a tensor lies now, or NOWHERE that is known; anything else as it is."""
        if type(x) in OTHERS:
            return x
        if type(x) is Number:
            return Spot(True, self.numbers[id(x)], 0, None) if id(x) in self.numbers else NOWHERE
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        at = x.data_ptr()
        if not x.numel() or at in self.given:
            return Spot(True, self.given.get(at, 0), 0, like)
        for number in reversed(range(len(self.buffers))):  # of those at an address, the last made
            begin, size = self.buffers[number]
            if begin <= at < begin + size:
                return Spot(False, number, at - begin, like)
        return NOWHERE


def note(kernel: Launchable, grid: int, arguments: tuple[Any, ...]) -> None:
    """Tell the recorder of this thread, if there is one, what was launched."""
    recorder = getattr(_local, "recorder", None)
    if recorder is not None:
        with unseen():
            found = [recorder.find(x) for x in arguments]
        recorder.launches.append((kernel, grid, found))


@contextmanager
def unseen() -> Iterator[None]:
    """Keep what torch does inside from the recorder of this thread, if there is one."""
    recorder = getattr(_local, "recorder", None)
    if recorder is not None:
        recorder.looks = False
    yield
    if recorder is not None:
        recorder.looks = True


class Tape:
    """A recorded call. Bases are its tensors, its results, and the scratch with all else."""

    def __init__(self, recorder: Recorder, given: Sequence[Given], results: Sequence[Tensor]):
        self.results = [(tuple(x.shape), x.stride(), x.dtype) for x in results]
        self.listed = isinstance(results, list)
        base = {recorder.find(x).number: len(given) + i for i, x in enumerate(results) if x.numel()}
        uses: dict[int, list[int]] = {}  # of buffers that are no results: which launches
        for i, (_, _, arguments) in enumerate(recorder.launches):
            for x in arguments:
                if type(x) is Spot and not x.given and x.number not in base:
                    uses.setdefault(x.number, []).append(i)
        spans = [(recorder.buffers[number][1], used[0], used[-1]) for number, used in uses.items()]
        offsets, self.scratch = arrange(spans)
        offset = dict(zip(uses, offsets, strict=True))

        def place(x: Any) -> Any:
            if type(x) is not Spot:
                return x
            if x.given:
                return Place(x.number, x.offset, x.like)
            if x.number in base:
                return Place(base[x.number], x.offset, x.like)
            return Place(len(given) + len(results), offset[x.number] + x.offset, x.like)

        self.launches: list[Play] = [
            kernel.again(grid, [place(x) for x in arguments])
            for kernel, grid, arguments in recorder.launches
        ]
        on_gpu = [x for x in self.launches if type(x) is Again]
        if len(on_gpu) == len(self.launches) > 1:
            self.launches = [Chain(on_gpu)]

    def play(self, given: Sequence[Given], addresses: Sequence[int]) -> Results:
        """The same on other tensors, which lie at these addresses."""
        device = given[0].device
        results = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype in self.results
        ]
        scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
        bases = [*given, *results, scratch]
        places = [*addresses, *[x.data_ptr() for x in results], scratch.data_ptr()]
        for launch in self.launches:
            launch(bases, places)
        return results if self.listed else tuple(results)


def _record(run: Callable, arguments: Sequence[Any], given: Sequence[Given]) -> Any:
    """The results of a call, and its tape if it can be played."""
    with Recorder(given) as recorder:
        results = run(*arguments)
    spots = [(recorder.find(x), _bytes(x)) for x in results if x.numel()]
    known = all(x is not NOWHERE for _, _, found in recorder.launches for x in found)
    whole = all(
        spot is not NOWHERE and not spot.given and size == recorder.buffers[spot.number][1]
        for spot, size in spots
    )
    playable = recorder.alone and known and whole
    playable = playable and len({spot.number for spot, _ in spots}) == len(spots)
    return results, Tape(recorder, given, results) if playable else None


def arrange(spans: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets of buffers of (bytes, first use, last use), and where the last of them ends.

    What is in use at the same time does not overlap. The largest, the longest in use or those with
    the most of both lie lowest, whichever needs the least.
    """
    sizes, lives = [size for size, _, _ in spans], [last - first + 1 for _, first, last in spans]
    both = [size * life for size, life in zip(sizes, lives, strict=True)]
    return min((_stack(spans, weights) for weights in (sizes, both, lives)), key=lambda x: x[1])


def _stack(spans: Sequence[tuple[int, int, int]], weights: Sequence[int]) -> tuple[list[int], int]:
    """As `arrange`: the heaviest first, each as low as it can lie."""
    placed: dict[int, tuple[int, int]] = {}  # begin and end
    for i in sorted(range(len(spans)), key=lambda i: -weights[i]):
        size, first, last = spans[i]
        together = [placed[j] for j in placed if spans[j][1] <= last and first <= spans[j][2]]
        at = 0
        for low, high in sorted(together):
            if at + size <= low:
                break
            at = max(at, high)
        placed[i] = at, at + -(-size // WORD) * WORD
    offsets = [placed[i][0] for i in range(len(spans))]
    return offsets, max((high for _, high in placed.values()), default=0)


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def played(run: Callable[..., Results]) -> Callable[..., Results]:
    """`run`, recorded when it is called a second time with arguments of the same kinds.

    It takes tensors, numbers and None, returns new tensors, and looks at no tensor's values. Where
    torch computes a part of it, it is run as ever.
    """
    seen: set[Any] = set()
    tapes: dict[Any, Tape | None] = {}

    @functools.wraps(run)
    def call(*arguments: Any) -> Results:
        given: list[Given] = []
        addresses: list[int] = []  # of tensors; of a number itself, as in `Place`
        kinds: list[Any] = [threading.get_ident()]
        for x in arguments:
            if type(x) in OTHERS:
                kinds.append(x)
                continue
            given.append(x)
            if type(x) is Number:
                kinds.append(Number)
                addresses.append(x)
                continue
            at = x.data_ptr()
            addresses.append(at)
            # The last: which of them are one and the same.
            kinds += x.shape, x.stride(), x.dtype, at % 16, addresses.index(at)
        kinds.append(given[0].device)
        key = tuple(kinds)
        if key in tapes:
            tape = tapes[key]
            return run(*arguments) if tape is None else tape.play(given, addresses)
        if key in seen:
            results, tapes[key] = _record(run, arguments, given)
            return results
        if len(seen) >= MOST:
            seen.clear()
            tapes.clear()
        seen.add(key)
        return run(*arguments)

    return call
