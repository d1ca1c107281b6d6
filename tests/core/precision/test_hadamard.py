"""The random Hadamard transform against the matrix that Kronecker products make."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
import torch

from core.precision.hadamard import hadamard, hadamard_signs, inverse_hadamard

SIGNS = hadamard_signs(3, "layers.0.mlp.down")
MATRIX = reduce(np.kron, [np.array([[1.0, 1.0], [1.0, -1.0]])] * 4) / 4


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers that were bfloat16: sums of sixteen are exact in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().to(dtype)


@pytest.mark.parametrize("shape", [(16,), (3, 48), (2, 5, 32), (0, 16), (4, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_groups_of_sixteen_are_multiplied_by_the_signed_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = draw(*shape, dtype=dtype)
    got = hadamard(x, SIGNS)
    assert got.shape == x.shape and got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    truth = ((x.double().numpy().reshape(-1, 16) * SIGNS.numpy()) @ MATRIX).reshape(shape)
    tolerance = 0.0 if dtype == torch.float64 else 2e-6
    np.testing.assert_allclose(got.double().numpy(), truth, rtol=0, atol=tolerance)


def test_it_is_orthogonal() -> None:
    matrix = hadamard(torch.eye(16, dtype=torch.float64), SIGNS)
    assert torch.equal(matrix @ matrix.T, torch.eye(16, dtype=torch.float64))
    assert torch.equal(matrix.T @ matrix, torch.eye(16, dtype=torch.float64))


def test_its_inverse_is_exact_in_float64() -> None:
    x = draw(7, 64)
    assert torch.equal(inverse_hadamard(hadamard(x, SIGNS), SIGNS), x)
    assert torch.equal(hadamard(inverse_hadamard(x, SIGNS), SIGNS), x)


def test_a_product_of_two_transformed_operands_is_unchanged() -> None:
    a, b = draw(5, 48), draw(3, 48)
    torch.testing.assert_close(hadamard(a, SIGNS) @ hadamard(b, SIGNS).T, a @ b.T, rtol=1e-14, atol=1e-14)


def test_an_outlier_is_spread_over_its_group_alone() -> None:
    x = torch.zeros(1, 48, dtype=torch.float64)
    x[0, 21] = 100.0
    got = hadamard(x, SIGNS)
    assert got[0, 16:32].abs().tolist() == [25.0] * 16 and got.count_nonzero() == 16


def test_signs_are_random_and_belong_to_seed_and_name() -> None:
    assert set(SIGNS.tolist()) == {-1.0, 1.0}
    assert torch.equal(SIGNS, hadamard_signs(3, "layers.0.mlp.down"))
    many = [tuple(hadamard_signs(seed, name).tolist()) for seed in range(4) for name in ("a", "b")]
    assert len(set(many)) == len(many)
    mean = torch.stack([hadamard_signs(seed, "a") for seed in range(400)]).mean().item()
    assert abs(mean) < 4 / 6400**0.5


def test_a_group_that_is_not_full_is_refused() -> None:
    with pytest.raises(ValueError, match="16 divides"):
        hadamard(torch.zeros(3, 40), SIGNS)
    with pytest.raises(ValueError, match="16 divides"):
        inverse_hadamard(torch.zeros(3, 8), SIGNS)
