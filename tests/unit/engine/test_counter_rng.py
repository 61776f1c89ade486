"""Noise that depends on nothing but its keys."""

import math

import torch

from engine.counter_rng import gumbel_noise, row_keys

CPU = torch.device("cpu")


def test_noise_of_a_row_depends_on_its_keys_alone() -> None:
    keys = [row_keys(seed, position) for seed in (0, 7) for position in (0, 1)]
    together = gumbel_noise(keys, 1000, CPU)
    for row, key in enumerate(keys):
        assert torch.equal(gumbel_noise([key], 1000, CPU)[0], together[row])


def test_noise_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    key = [row_keys(3, 4)]
    assert torch.equal(gumbel_noise(key, 50, CPU)[0], gumbel_noise(key, 5000, CPU)[0, :50])


def test_seeds_and_positions_give_unrelated_rows() -> None:
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2**63 - 1, 0), (2**63 - 1, 1)]
    noise = gumbel_noise([row_keys(*pair) for pair in pairs], 20_000, CPU)
    correlations = torch.corrcoef(noise) - torch.eye(len(pairs))
    assert correlations.abs().max() < 5 / math.sqrt(20_000)


def test_neighbouring_tokens_are_unrelated() -> None:
    noise = gumbel_noise([row_keys(5, 6)], 200_000, CPU)[0]
    for lag in (1, 2, 64, 65_536):
        pair = torch.stack((noise[:-lag], noise[lag:]))
        assert torch.corrcoef(pair)[0, 1].abs() < 5 / math.sqrt(len(noise) - lag)


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise([row_keys(1, position) for position in range(50)], 10_000, CPU).flatten()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772) < 0.01  # Euler's constant
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.03
    for probability in (0.001, 0.1, 0.5, 0.9, 0.999):
        quantile = -math.log(-math.log(probability))
        assert abs((noise < quantile).double().mean().item() - probability) < 0.003


def test_every_32_bit_pattern_gives_finite_noise() -> None:
    extremes = [(0, 0), (2**32 - 1, 2**32 - 1), (2**31, 2**31), (0, 2**32 - 1)]
    assert torch.isfinite(gumbel_noise(extremes, 1 << 20, CPU)).all()


def test_noise_is_pinned() -> None:
    """Two workers of different releases must draw alike: a change here changes every seeded answer."""
    noise = gumbel_noise([row_keys(42, 3)], 4, CPU)[0]
    assert row_keys(42, 3) == (1779996252, 2319239696)
    torch.testing.assert_close(
        noise, torch.tensor([0.412253, 1.173711, 1.093341, 1.570291]), rtol=1e-5, atol=1e-6
    )
