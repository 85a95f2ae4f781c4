"""Stateless random numbers: uniform, unrelated along every coordinate, and the same for ever."""

import numpy as np
import pytest
import torch

from tracformer.rng import LENGTH, ORDER, SAMPLE, TIME, derived_seed, uniforms


def chi_square(values: torch.Tensor, cells: int) -> float:
    """In standard deviations of a chi-square with cells - 1 degrees of freedom."""
    counts = torch.bincount((values * cells).long(), minlength=cells).double()
    expected = len(values) / cells
    return (
        float(((counts - expected) ** 2 / expected).sum() - (cells - 1)) / (2 * (cells - 1)) ** 0.5
    )


@pytest.mark.parametrize("stream", [SAMPLE, ORDER, TIME, LENGTH])
def test_uniform_along_positions_and_along_seeds(stream: int) -> None:
    N = 50_000
    for seeds, positions in (([7] * N, range(N)), (range(N), [3] * N)):
        values = uniforms(list(seeds), list(positions), stream)
        assert values.dtype == torch.float64
        assert values.min() >= 0
        assert values.max() < 1
        assert abs(chi_square(values, 64)) < 4


def test_neighbours_in_every_coordinate_are_unrelated() -> None:
    """The joint of two neighbouring numbers is uniform over the square."""
    N = 16_000
    seeds, positions = [i // 125 for i in range(N)], [i % 125 for i in range(N)]
    here = uniforms(seeds, positions)
    others = {
        "seed": uniforms([s + 1 for s in seeds], positions),
        "position": uniforms(seeds, [p + 1 for p in positions]),
        "stream": uniforms(seeds, positions, ORDER),
        "swapped": uniforms(positions, seeds),
        "derived": uniforms([derived_seed(s, 1) for s in seeds], positions),
    }
    for name, there in others.items():
        different = here != there
        assert different.double().mean() > 0.99, name
        pair = ((here * 8).floor() * 8 + (there * 8).floor())[different] / 64 + 1 / 128
        assert abs(chi_square(pair, 64)) < 4, name


def test_known_values() -> None:
    """Samples of a seed stay the same from version to version: these are splitmix64 on paper, not
    what the code happens to give.
    """

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    assert mix(0) == 0xE220A8397B1DCDAF  # the published first output of splitmix64 from state 0
    for seed, position, stream in (
        (0, 0, SAMPLE),
        (1, 0, SAMPLE),
        (2**63 + 5, 1000, TIME),
        (-1, 3, ORDER),
    ):
        word = mix((mix((mix(seed % 2**64) + position) % 2**64) + stream) % 2**64)
        assert float(uniforms([seed], [position], stream)) == (word >> 11) / 2**53
    assert float(uniforms([0], [0])) == 0.13870941014555427


def test_every_kind_of_integers_gives_the_same() -> None:
    seeds, positions = [3, 2**40, 0], [0, 5, 9]
    expected = uniforms(seeds, positions)
    assert torch.equal(uniforms(torch.tensor(seeds), torch.tensor(positions)), expected)
    assert torch.equal(uniforms(np.array(seeds), np.array(positions, dtype=np.int32)), expected)
    assert torch.equal(uniforms([-1], [0]), uniforms(torch.tensor([-1]), [0]))


def test_derived_seeds() -> None:
    assert derived_seed(42, 0) == 42
    family = [derived_seed(seed, index) for seed in range(30) for index in range(1, 100)]
    assert len(set(family)) == len(family)
    assert all(0 <= seed < 2**63 for seed in family)  # fits a signed word
    assert derived_seed(42, 1) == derived_seed(42, 1)
