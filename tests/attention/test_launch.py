"""How kernels are launched, one by one and as a graph, told by a driver that launches nothing."""

import ctypes
import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longspan.attention import launch, nvrtc
from longspan.attention.launch import Again, Chain, Launch, Place


class Driver:
    """Does as told by errors, and notes what it was given."""

    def __init__(self, *errors):
        self.errors, self.entered, self.given, self.graphs = list(errors), 0, [], []
        self.live = set()  # graphs that were not destroyed
        self.CUDA_KERNEL_NODE_PARAMS = SimpleNamespace

    def _result(self):
        name = self.errors.pop(0) if self.errors else None
        return SimpleNamespace(name=name) if name else 0

    def _values(self, at, count):
        places = ctypes.cast(at, ctypes.POINTER(ctypes.POINTER(ctypes.c_int64)))
        return [places[i][0] for i in range(count)]

    def cuLaunchKernel(self, handle, *sizes):
        *sizes, shared, stream, addresses, _ = sizes
        self.given.append((handle, *sizes, shared, stream, *self._values(addresses, 4)))
        return (self._result(),)

    def cuCtxGetCurrent(self):
        self.entered += 1
        return 0, 1

    def cuGraphCreate(self, flags):
        graph = f"graph {len(self.live)}"
        self.live.add(graph)
        self.graphs.clear()
        return self._result(), graph

    def cuGraphAddKernelNode(self, graph, before, count, parameters):
        assert graph == f"graph {len(self.live) - 1}"
        assert before == ([len(self.graphs) - 1] if self.graphs else [])
        assert count == len(before)
        self.graphs.append(None)
        self._tell(len(self.graphs) - 1, parameters)
        return self._result(), len(self.graphs) - 1

    def _tell(self, node, p):
        sizes = p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ
        values = self._values(p.kernelParams, 4)
        self.graphs[node] = (p.func, *sizes, p.sharedMemBytes, *values)

    def cuGraphInstantiate(self, graph, flags):
        self.live.add("runs")
        return self._result(), "runs"

    def cuGraphExecKernelNodeSetParams(self, graph, node, parameters):
        assert graph == "runs"
        self.given.append(("told", node))
        error = self._result()
        if not error:
            self._tell(node, parameters)
        return (error,)

    def cuGraphLaunch(self, graph, stream):
        assert graph == "runs"
        self.given.append(("graph", stream, *self.graphs))
        return (self._result(),)

    def cuGraphDestroy(self, graph):
        self.live.remove(graph)

    cuGraphExecDestroy = cuGraphDestroy


@pytest.fixture
def use(monkeypatch):
    """A function that has a driver used, on stream 5, which is captured or not."""

    def use(driver, captured=False):
        for module in (launch, nvrtc):
            monkeypatch.setattr(module, "driver", lambda: driver)
        torchs = {
            "_cuda_getDevice": lambda: 0,
            "_cuda_getCurrentRawStream": lambda device: 5,
            "_cuda_isCurrentStreamCapturing": lambda: captured,
        }
        for name, function in torchs.items():
            monkeypatch.setattr(torch._C, name, function, raising=False)
        return driver

    return use


ARGUMENTS = 1 << 40, 1.0, None
BITS = 1 << 40, 0x3F800000, 0


@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_a_launch_hands_over_the_bits_of_its_arguments(again, use):
    driver, x = use(Driver()), torch.zeros(3)
    run = Launch("rows.finish", 11, 4, 256, 128)
    if again:
        run.again(7, [Place(1, 8, None), *ARGUMENTS])([x], [0, x.data_ptr() - 8])
    else:
        run(7, [x, *ARGUMENTS])
    assert driver.given == [(11, 7, 1, 1, 256, 1, 1, 128, 5, x.data_ptr(), *BITS)]
    assert driver.entered == 0


def test_a_thread_without_a_context_is_given_one(use):
    driver = use(Driver("CUDA_ERROR_INVALID_CONTEXT"))
    Launch("rows.finish", 11, 4, 256)(7, [0, *ARGUMENTS])
    assert (driver.entered, len(driver.given)) == (1, 2)


def test_a_launch_that_fails_says_which(use):
    use(Driver("CUDA_ERROR_OUT_OF_MEMORY"))
    message = "rows.finish could not be launched: CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(RuntimeError, match=message):
        Launch("rows.finish", 11, 4, 256)(7, [0, *ARGUMENTS])


def test_a_kernel_is_allowed_its_shared_memory_once(use, monkeypatch):
    driver = use(Driver())
    asked, errors = [], [0, SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE")]
    most = {"CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8}
    driver.CUfunction_attribute = SimpleNamespace(**most)
    driver.cuKernelSetAttribute = lambda *given: asked.append(given) or (errors.pop(0),)
    driver.cuKernelGetFunction = lambda kernel: (0, 100 + kernel)
    monkeypatch.setattr(nvrtc, "_load", lambda *_: SimpleNamespace(handle=11))
    run = nvrtc.launcher(Path("codes.cu"))
    for _ in range(2):
        run("bucket_lists_32k", 7, 1024, 1, 2, 3, 4, shared=1 << 16)
    assert asked == [(8, 1 << 16, 11, 0)]
    assert [given[:9] for given in driver.given] == [(111, 7, 1, 1, 1024, 1, 1, 1 << 16, 5)] * 2
    with pytest.raises(RuntimeError, match="memory are too many: CUDA_ERROR_INVALID_VALUE"):
        run("another", 7, 1024, 1, 2, 3, 4, shared=1 << 16)


def test_a_kernel_that_cannot_be_loaded_says_which(use, monkeypatch):
    error = SimpleNamespace(name="CUDA_ERROR_NO_BINARY_FOR_GPU")
    use(Driver()).cuKernelGetFunction = lambda kernel: (error, None)
    monkeypatch.setattr(nvrtc, "_load", lambda *_: SimpleNamespace(handle=11))
    run = nvrtc.launcher(Path("codes.cu"))
    with pytest.raises(RuntimeError, match=f"codes.lists could not be loaded: {error.name}"):
        run("lists", 7, 1024, 1, 2, 3, 4)


def two():
    """Two launches: the first on base 0, the second 8 bytes behind base 1."""
    first = Launch("hash.codes", 11, 4, 256).again(7, [Place(0, 0, None), *ARGUMENTS])
    second = Launch("rows.finish", 12, 4, 512, 64).again(9, [Place(1, 8, None), *ARGUMENTS])
    return [first, second]


def nodes(one, other):
    return (11, 7, 1, 1, 256, 1, 1, 0, one, *BITS), (12, 9, 1, 1, 512, 1, 1, 64, other, *BITS)


def test_a_chain_is_told_of_addresses_that_changed(use):
    driver, chain = use(Driver()), Chain(two())
    for addresses in ([1000, 2000], [1000, 2000], [1000, 3000], [4000, 5000]):
        chain(None, addresses)
    assert driver.given == [
        ("graph", 5, *nodes(1000, 2008)),
        ("graph", 5, *nodes(1000, 2008)),
        ("told", 1),
        ("graph", 5, *nodes(1000, 3008)),
        ("told", 0),
        ("told", 1),
        ("graph", 5, *nodes(4000, 5008)),
    ]
    assert driver.live == {"graph 0", "runs"}
    del chain
    gc.collect()
    assert not driver.live


def test_a_base_that_no_node_reads_tells_nobody(use):
    driver, chain = use(Driver()), Chain(two())
    for third in (7, 8, 8):
        chain(None, [1000, 2000, third])
    assert driver.given == [("graph", 5, *nodes(1000, 2008))] * 3


def test_a_captured_stream_gets_launches_and_the_graph_is_not_told(use):
    driver, chain = use(Driver()), Chain(two())
    chain(None, [1000, 2000])
    use(driver, captured=True)
    chain(None, [6000, 7000])
    use(driver)
    chain(None, [1000, 2000])
    chain(None, [6000, 2000])
    launched = [
        (11, 7, 1, 1, 256, 1, 1, 0, 5, 6000, *BITS),
        (12, 9, 1, 1, 512, 1, 1, 64, 5, 7008, *BITS),
    ]
    assert driver.given == [
        ("graph", 5, *nodes(1000, 2008)),
        *launched,
        ("graph", 5, *nodes(1000, 2008)),
        ("told", 0),
        ("graph", 5, *nodes(6000, 2008)),
    ]
    use(driver, captured=True)
    other = Chain(two())
    other(None, [1, 2])
    assert other.graph is None


def test_a_chain_that_fails_says_which_and_is_told_again(use):
    driver, chain = use(Driver()), Chain(two())
    chain(None, [1000, 2000])
    driver.errors = [None, "CUDA_ERROR_INVALID_VALUE"]  # the first node is told, the second is not
    message = "hash.codes, rows.finish could not be launched: CUDA_ERROR_INVALID_VALUE"
    with pytest.raises(RuntimeError, match=message):
        chain(None, [3000, 4000])
    driver.given.clear()
    driver.errors = ["CUDA_ERROR_INVALID_CONTEXT"]
    entered = driver.entered
    chain(None, [3000, 4000])
    # A node that was told is told again: how far it came is not kept.
    told = [("told", 0), ("told", 0), ("told", 1)]
    assert driver.given == [*told, ("graph", 5, *nodes(3000, 4008))]
    assert driver.entered == entered + 1


def test_a_chain_that_cannot_be_made_says_which_and_is_made_anew(use):
    driver, chain = use(Driver(None, None, "CUDA_ERROR_OUT_OF_MEMORY")), Chain(two())
    message = "hash.codes, rows.finish could not be made a graph: CUDA_ERROR_OUT_OF_MEMORY"
    with pytest.raises(RuntimeError, match=message):
        chain(None, [1000, 2000])
    chain(None, [3000, 2000])
    assert driver.given == [("graph", 5, *nodes(3000, 2008))]
    assert driver.live == {"graph 0", "graph 1", "runs"}
    del chain
    gc.collect()
    assert not driver.live


@pytest.mark.parametrize("count", [1, 2])
def test_launches_of_a_tape_on_a_gpu_are_a_chain(count):
    """Of more than one: a graph of one kernel would be a launch with more to tell."""
    from longspan.attention import tape

    x, y = torch.zeros(3), torch.empty(3)
    recorder = tape.Recorder([x])
    recorder.buffers = [(y.data_ptr(), 12)]
    run = Launch("rows.finish", 12, 4, 512)
    found = [recorder.find(x), recorder.find(y), 1, 2]
    recorder.launches = [(run, 9, found)] * count
    launches = tape.Tape(recorder, [x], [y]).launches
    assert [type(x) for x in launches] == [Again if count == 1 else Chain]
