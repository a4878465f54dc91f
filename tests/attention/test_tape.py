"""Calls that are played from a tape are the calls that were recorded, on other tensors."""

import weakref
from itertools import combinations
from random import Random

import pytest
import torch
from cases import qkv, relative_error

pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")

import longspan
from longspan.attention import tape
from longspan.attention.linformer.kernels import linformer_backward, linformer_forward
from longspan.attention.nystrom.kernels import nystrom_backward, nystrom_forward
from longspan.attention.tiles import INTERPRETED, Kernel, add_parts, tl
from longspan.attention.window.kernels import window_backward, window_forward
from longspan.attention.yoso.expectation import (
    yoso_expectation_backward,
    yoso_expectation_forward,
)

DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs Triton's interpreter or a GPU"
)


def nystrom(forward, backward, q, k, v):
    y, *saved = forward(q, k, v, None, 4, 1, False, 0.3, True)
    return y, *backward(y, q, k, v, None, y, *saved, 1, False, 0.3)


def masked_nystrom(forward, backward, q, k, v):
    mask = torch.rand(k.shape[0], k.shape[2], device=DEVICE) < 0.7
    y, *saved = forward(q, k, v, mask, 4, 1, False, 0.3, True)
    return y, *backward(y, q, k, v, mask, y, *saved, 1, False, 0.3)


def linformer(forward, backward, q, k, v):
    e, f = torch.randn(2, 5, k.shape[2], device=DEVICE)
    y, *saved = forward(q, k, v, e, f, None, 0.3)
    return y, *backward(y, q, k, v, e, f, None, y, *saved, 0.3, True)


def window(forward, backward, q, k, v):
    mask = torch.rand(q.shape[0], q.shape[2], device=DEVICE) < 0.7
    y, lse = forward(q, k, v, mask, 5, 0.3)
    return y, *backward(y, q, k, v, mask, y, lse, 5, 0.3)


def expectation(forward, backward, q, k, v):
    y, inverse = forward(q, k, v, 4, True)
    return y, *backward(y, q, k, v, y, inverse, 4, False, True)


METHODS = {
    nystrom: (nystrom_forward, nystrom_backward),
    masked_nystrom: (nystrom_forward, nystrom_backward),
    linformer: (linformer_forward, linformer_backward),
    window: (window_forward, window_backward),
    expectation: (yoso_expectation_forward, yoso_expectation_backward),
}


@pytest.mark.parametrize("layout", ["apart", "packed", "odd"])
@pytest.mark.parametrize("method", METHODS, ids=lambda f: f.__name__)
def test_played_is_as_run(method, layout, monkeypatch):
    """Both passes of every method: run, then recorded, then played; the bits are the same."""
    plain = [op.__wrapped__ for op in METHODS[method]]
    played = [tape.played(run) for run in plain]
    plays = []
    play = tape.Tape.play
    monkeypatch.setattr(tape.Tape, "play", lambda *these: plays.append(1) or play(*these))
    kept = []  # so that addresses differ
    for seed in range(5):
        shape = dict(batch=1, queries=11 if layout == "odd" else 12, channels=16)
        q, k, v = qkv(**shape, seed=seed, device=DEVICE)
        if layout == "packed":  # (B, H, N, 3, D): one memory for all three
            q, k, v = torch.stack([q, k, v], 3).unbind(3)
        results = []
        for ops in (plain, played):
            torch.manual_seed(seed)
            results.append(method(*ops, q, k, v))
        kept.append((q, k, v, results))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
    assert len(plays) == 2 * 3  # of both ops, from the third call on


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["apart", "packed", "odd"])
@pytest.mark.parametrize("method", METHODS, ids=lambda f: f.__name__)
def test_played_is_as_run_on_a_gpu(method, layout, monkeypatch):
    test_played_is_as_run(method, layout, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [4, 9], ids=["in-tables", "walked"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_yoso_is_played_on_a_gpu(bits, masked, monkeypatch):
    """Its atomic additions have no order, so that bits differ; a wrong address would show."""
    plays = []
    play = tape.Tape.play
    monkeypatch.setattr(tape.Tape, "play", lambda *these: plays.append(1) or play(*these))
    for seed in range(4):
        q, k, v = qkv(queries=777, channels=64, dtype=torch.bfloat16, seed=seed, device=DEVICE)
        mask = torch.rand(q.shape[0], 777, device=DEVICE) < 0.7 if masked else None
        g, results = torch.randn_like(v), []
        for impl in ("fused", "reference"):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            place = torch.tensor(seed, device=DEVICE)  # as if drawn: not a part of the kind
            y = longspan.yoso(*leaves, key_mask=mask, hash_bits=bits, seed=place, impl=impl)
            results.append([y, *torch.autograd.grad(y, leaves, g)])
        for fused, plain in zip(*results, strict=True):
            # bfloat16's rounding on both sides, and float16's in between: some 3e-3 each.
            assert relative_error(fused, plain) < 2e-2
    assert len(plays) == 4


@Kernel
def _double(x, y, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)


def doubled(x, more):
    """The sum is torch's: no kernel's launch tells of it."""
    both = x.new_empty(2, *x.shape)
    _double[(1,)](x, both[0], x.numel(), N=32)
    _double[(1,)](more, both[1], x.numel(), N=32)
    return (both.sum(0),)


def test_what_torch_computes_is_run_as_ever():
    call = tape.played(doubled)
    for _ in range(4):
        x, more = torch.randn(2, 20, device=DEVICE)
        (y,) = call(x, more)
        torch.testing.assert_close(y, 2 * (x + more))


def test_one_tensor_for_two_is_another_kind_of_call():
    call = tape.played(scaled_sum)
    x, more = torch.randn(2, 20, device=DEVICE)
    for _ in range(4):
        (y,) = call(x, x)
        torch.testing.assert_close(y, 4 * x)
    for _ in range(4):
        (y,) = call(x, more)
        torch.testing.assert_close(y, 2 * (x + more))


def scaled_sum(x, more):
    both = x.new_empty(2, *x.shape)
    _double[(1,)](x, both[0], x.numel(), N=32)
    _double[(1,)](more, both[1], x.numel(), N=32)
    return (add_parts(both, x.dtype),)


def chain(x, made):
    """Each buffer is let go before the next but one is made."""
    for _ in range(5):
        y = torch.empty_like(x)
        made.append(weakref.ref(y))
        _double[(1,)](x, y, x.numel(), N=32)
        x = y
    return (x,)


def test_recording_keeps_no_buffer_longer_than_running():
    x, made = torch.randn(20, device=DEVICE), []
    with tape.Recorder([x]) as recorder:
        (y,) = chain(x, made)
    assert [ref() is not None for ref in made] == [False, False, False, False, True]
    assert tape.Tape(recorder, [x], [y]).scratch == 2 * tape.WORD
    call = tape.played(lambda x: chain(x, []))
    for _ in range(4):
        x = torch.randn(20, device=DEVICE)
        torch.testing.assert_close(call(x)[0], 32 * x)


def test_of_buffers_at_one_address_the_last_is_meant():
    x = torch.randn(20, device=DEVICE)
    recorder = tape.Recorder([])
    recorder.buffers = [(x.data_ptr() - 64, 300), (x.data_ptr(), 80), (x.data_ptr() + 80, 80)]
    assert recorder.find(x)[:3] == (False, 1, 0)
    assert recorder.find(x[4:])[:3] == (False, 1, 16)
    recorder.buffers.append((x.data_ptr() - 16, 200))
    assert recorder.find(x)[:3] == (False, 3, 16)
    assert recorder.find(7) == 7
    recorder.buffers.clear()
    assert recorder.find(x) is tape.NOWHERE


def test_a_part_of_what_is_given_is_no_place_to_play_from():
    def run(x):
        y = torch.empty_like(x[4:])
        _double[(1,)](x[4:], y, y.numel(), N=32)
        return (y,)

    call = tape.played(run)
    for _ in range(4):
        x = torch.randn(20, device=DEVICE)
        torch.testing.assert_close(call(x)[0], 2 * x[4:])


def test_kinds_are_forgotten_when_there_are_many(monkeypatch):
    monkeypatch.setattr(tape, "MOST", 2)
    call = tape.played(scaled_sum)
    for size in (3, 4, 5, 3, 4, 5, 5, 5, 5):
        x, more = torch.randn(2, size, device=DEVICE)
        torch.testing.assert_close(call(x, more)[0], 2 * (x + more))


def test_buffers_share_memory_where_their_uses_do_not_overlap():
    random = Random(0)
    for _ in range(50):
        spans = [(random.randint(1, 5000), first, first + random.randint(0, 4))
                 for first in sorted(random.choices(range(12), k=9))]  # fmt: skip
        offsets, end = tape.arrange(spans)
        assert all(at % tape.WORD == 0 for at in offsets)
        placed = [(at, at + size, *uses) for at, (size, *uses) in zip(offsets, spans, strict=True)]
        assert end >= max(high for _, high, _, _ in placed)
        for (a, b, first, last), (c, d, other_first, other_last) in combinations(placed, 2):
            assert b <= c or d <= a or last < other_first or other_last < first
    assert tape.arrange([(1000, 0, 1), (3000, 1, 2), (900, 2, 3)]) == ([3072, 0, 3072], 4096)
    # The largest first would need 11.
    awkward = [(3, 0, 3), (4, 3, 3), (3, 2, 4), (5, 1, 1)]
    assert tape.arrange([(512 * size, *uses) for size, *uses in awkward])[1] == 512 * 10


@pytest.mark.gpu
def test_a_played_call_is_captured_and_runs_on_any_stream():
    q, k, v = qkv(queries=700, channels=64, dtype=torch.bfloat16, device="cuda")
    attend = lambda: longspan.yoso(q, k, v, seed=3, impl="fused")  # noqa: E731
    kept = [attend() for _ in range(5)]  # run, recorded, then played
    assert all(torch.equal(y, kept[0]) for y in kept)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attend()
    assert torch.equal(attend(), kept[0])
    v.mul_(-2)
    graph.replay()
    assert torch.equal(y, attend())
    assert not torch.equal(y, kept[0])
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for i in range(12):
        with torch.cuda.stream(streams[i % 3]):
            results.append(attend())
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x in results)
