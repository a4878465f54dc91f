"""Kernels launched through the driver: one by one, or all of a call at once, as a graph."""

import ctypes
import functools
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@functools.cache
def driver() -> Any:
    """The bindings of CUDA's driver."""
    from cuda.bindings import driver

    return driver


class Place(NamedTuple):
    """Of a tensor: so many bytes behind the address of a base, with the look of a meta tensor.

    Of a number: its base alone, whose address is the number itself.
    """

    base: int
    offset: int
    like: Any


class Launch:
    """A loaded kernel, and room for so many arguments: for one thread, which may use it again."""

    def __init__(self, name: str, handle: int, arguments: int, block: int, shared: int = 0) -> None:
        self.name, self.handle, self.block, self.shared = name, handle, block, shared
        self.values = (ctypes.c_int64 * arguments)()
        start = ctypes.addressof(self.values)
        self.addresses = (ctypes.c_void_p * arguments)(*range(start, start + 8 * arguments, 8))
        self.at = ctypes.addressof(self.addresses)

    def __call__(self, grid: int, arguments: Iterable[object]) -> None:
        """Run it on the current stream; arguments as in `nvrtc.launcher`."""
        self._fill(arguments)
        self.go(grid)

    def again(self, grid: int, arguments: Sequence[Any]) -> "Again":
        """The same with room of its own, filled but for the addresses."""
        run = Launch(self.name, self.handle, len(self.values), self.block, self.shared)
        run._fill(None if type(x) is Place else x for x in arguments)
        slots = [(i, x.base, x.offset) for i, x in enumerate(arguments) if type(x) is Place]
        return Again(run, grid, slots)

    def go(self, grid: int) -> None:
        """Run it with the arguments that are in its room."""
        _on_stream(self.name, lambda stream: self._try(grid, stream))

    def _fill(self, arguments: Iterable[object]) -> None:
        self.values[:] = [x if type(x) is int else bits(x) for x in arguments]

    def _try(self, grid: int, stream: int) -> Any:
        (error,) = driver().cuLaunchKernel(
            self.handle, grid, 1, 1, self.block, 1, 1, self.shared, stream, self.at, 0
        )
        return error


@dataclass(frozen=True)
class Again:
    """A launch that was recorded: of some arguments, the places are known and not the addresses."""

    run: Launch
    grid: int
    slots: list[tuple[int, int, int]]  # argument, base, and bytes behind its address

    def __call__(self, bases: Any, addresses: Sequence[int]) -> None:
        """Run it on bases with these addresses."""
        self.fill(addresses)
        self.run.go(self.grid)

    def fill(self, addresses: Sequence[int]) -> None:
        """Put these addresses into its slots."""
        room = self.run.values
        for slot, base, offset in self.slots:
            room[slot] = addresses[base] + offset


class Chain:
    """Launches of one call, each after the one before, as one launch of a graph.

    That takes the host less time than to launch each, and the GPU waits less between them. The
    graph is told of addresses where they are others than before. Two of its launches never run at
    the same time, also on two streams. A stream that is captured gets each launch by itself.
    """

    def __init__(self, launches: Sequence[Again]) -> None:
        self.launches = launches
        self.nodes: list[tuple[Any, Any]]  # with parameters
        self.told: list[int | None]  # the addresses of bases that nodes have; None: not known
        self.users: dict[int, list[int]] = {}  # of a base: which nodes have it in a slot
        for i, launch in enumerate(launches):
            for base in {base for _, base, _ in launch.slots}:
                self.users.setdefault(base, []).append(i)
        self.name = ", ".join(launch.run.name for launch in launches)
        self.graph: Any = None

    def __call__(self, bases: Any, addresses: Sequence[int]) -> None:
        """Run them on bases with these addresses."""
        if torch._C._cuda_isCurrentStreamCapturing():
            for launch in self.launches:
                launch(bases, addresses)
        else:
            if self.graph is None:
                self._build(addresses)
            _on_stream(self.name, lambda stream: self._try(addresses, stream))

    def _build(self, addresses: Sequence[int]) -> None:
        enter(torch._C._cuda_getDevice())
        self.nodes, self.told = [], list(addresses)
        graph = self._made(driver().cuGraphCreate(0))
        weakref.finalize(self, driver().cuGraphDestroy, graph).atexit = False
        for launch in self.launches:
            run, parameters = launch.run, driver().CUDA_KERNEL_NODE_PARAMS()
            parameters.func, parameters.kernelParams = run.handle, run.at
            parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = launch.grid, 1, 1
            parameters.blockDimX, parameters.blockDimY, parameters.blockDimZ = run.block, 1, 1
            parameters.sharedMemBytes = run.shared
            launch.fill(addresses)
            before = [node for node, _ in self.nodes[-1:]]
            made = driver().cuGraphAddKernelNode(graph, before, len(before), parameters)
            self.nodes.append((self._made(made), parameters))
        self.graph = self._made(driver().cuGraphInstantiate(graph, 0))
        weakref.finalize(self, driver().cuGraphExecDestroy, self.graph).atexit = False

    def _made(self, result: tuple[Any, Any]) -> Any:
        error, made = result
        if error:
            raise RuntimeError(f"{self.name} could not be made a graph: {error.name}")
        return made

    def _try(self, addresses: Sequence[int], stream: int) -> Any:
        if addresses != self.told:
            others = [base for base in self.users if addresses[base] != self.told[base]]
            for base in others:
                self.told[base] = None  # until all is told: an error may come between
            for i in {i for base in others for i in self.users[base]}:
                self.launches[i].fill(addresses)
                (error,) = driver().cuGraphExecKernelNodeSetParams(self.graph, *self.nodes[i])
                if error:
                    return error
            self.told = list(addresses)
        (error,) = driver().cuGraphLaunch(self.graph, stream)
        return error


def _on_stream(name: str, attempt: Callable[[int], Any]) -> None:
    """Do something on the current stream that returns an error."""
    # torch.cuda's own functions for these two take longer than the launch.
    device = torch._C._cuda_getDevice()
    stream = torch._C._cuda_getCurrentRawStream(device)
    error = attempt(stream)
    if error and error.name == "CUDA_ERROR_INVALID_CONTEXT":
        enter(device)  # a new thread may have the number of a dead one
        error = attempt(stream)
    if error:
        raise RuntimeError(f"{name} could not be launched: {error.name}")


def enter(device: int) -> None:
    """Give a thread that torch started, and that used no kernel yet, the context of the others."""
    _, context = driver().cuCtxGetCurrent()
    if not int(context):
        _, context = driver().cuDevicePrimaryCtxRetain(device)
        driver().cuCtxSetCurrent(context)


def bits(x: object) -> int:
    """The bits of an argument; tensors last, since asking whether it is one takes long."""
    if type(x) is float:
        return int.from_bytes(struct.pack("<f", x), "little")
    if x is None or isinstance(x, int):
        return int(x or 0)
    assert isinstance(x, torch.Tensor)
    return x.data_ptr()
