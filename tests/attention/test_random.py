"""The generator that gives the same numbers on every device."""

import math

import pytest
import torch
from cases import DEVICES

from longspan.attention.random import bits, draw_seed, gaussian, signs

CPU = torch.device("cpu")


def mix(x: int) -> int:
    """The mixing function in whole numbers, as a kernel in another language would write it."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_bits_are_a_function_of_seed_and_position(seed):
    expected = [mix(mix(mix(i) ^ seed % 2**32) ^ seed >> 32) for i in range(1000)]
    assert bits(seed, 1000, CPU).tolist() == expected
    assert bits(1, 3, CPU).tolist() == [1492470133, 800308335, 2085358234]


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_draws_the_same(device):
    device = torch.device(device)
    assert torch.equal(bits(9, 10_000, device).cpu(), bits(9, 10_000, CPU))
    assert torch.equal(signs(9, (50, 200), device).cpu(), signs(9, (50, 200), CPU))
    # The logarithm's last place may differ before rounding to float32.
    torch.testing.assert_close(
        gaussian(9, (10_000,), device).cpu(), gaussian(9, (10_000,), CPU), rtol=2e-7, atol=1e-7
    )


def test_a_tensor_seed_equals_the_same_integer():
    seed = 2**61 + 12345
    assert torch.equal(bits(torch.tensor(seed), 100, CPU), bits(seed, 100, CPU))


@pytest.mark.parametrize("device", DEVICES)
def test_manual_seed_reproduces_the_drawn_seeds(device):
    device = torch.device(device)
    torch.manual_seed(3)
    first = [int(draw_seed(device)) for _ in range(100)]
    assert len(set(first)) == 100
    assert all(0 <= seed < 2**62 for seed in first)
    torch.manual_seed(3)
    assert [int(draw_seed(device)) for _ in range(100)] == first
    torch.manual_seed(4)
    assert not {int(draw_seed(device)) for _ in range(100)} & set(first)


@pytest.mark.gpu
def test_seeds_of_a_gpu_follow_its_generator():
    """As recomputing a forward pass wants it, which puts the generator back where it was."""
    cuda = torch.device("cuda")
    state = torch.cuda.get_rng_state()
    first, noise = draw_seed(cuda), torch.rand(5, device=cuda)
    assert draw_seed(cuda) != first
    torch.cuda.set_rng_state(state)
    assert draw_seed(cuda) == first
    assert torch.equal(torch.rand(5, device=cuda), noise)


def test_gaussian_moments_and_independence():
    n = 1 << 20
    for seed in (0, 1, 2**33):
        x = gaussian(seed, (n,), CPU).double()
        # Five standard errors of the first four moments: √(1, 2, 15, 96)/√n.
        for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs(x.pow(power).mean() - moment) < 5 * math.sqrt(variance / n), (seed, power)
        for lag in (1, 2, 64, n // 2):
            assert abs((x * x.roll(lag)).mean()) < 5 / math.sqrt(n), (seed, lag)
    neighbours = gaussian(0, (n,), CPU) * gaussian(1, (n,), CPU)
    assert abs(neighbours.double().mean()) < 5 / math.sqrt(n)


def test_signs_are_balanced():
    x = signs(5, (1 << 20,), CPU)
    assert set(x.unique().tolist()) == {-1.0, 1.0}
    assert abs(x.mean()) < 5 / 1024
