"""Power iteration never exceeds the largest singular value, and its start is within one per cent of it."""

import pytest
import torch

from specguard.linalg import power_step, top_right_vectors


def stacks(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    repeated = torch.linalg.qr(normal(3, 11, 7))[0]
    close = torch.linalg.qr(normal(3, 13, 13))[0] * torch.linspace(1, 0.999, 13, dtype=torch.float64)
    matrices = {
        "wide": normal(4, 7, 11),
        "tall": normal(4, 11, 7),
        "one row": normal(4, 1, 5),
        "one column": normal(4, 5, 1),
        "rank one": normal(3, 7, 1) @ normal(3, 1, 5),
        "repeated": repeated,
        "nearly repeated": close,
        "large": 1e8 * normal(2, 17, 19),
        "small": 1e-8 * normal(2, 17, 19),
        "huge": 1e15 * normal(2, 5, 7),
        "vanishing": 1e-15 * normal(2, 5, 7),
        "mixed scales": normal(5, 7, 11) * torch.logspace(-8, 8, 5, dtype=torch.float64).view(-1, 1, 1),
        "zero": torch.zeros(2, 5, 7, dtype=torch.float64),
    }
    return {name: W.to(dtype) for name, W in matrices.items()}


CASES = [(name, dtype) for dtype in (torch.float32, torch.float64) for name in stacks(dtype)]


def never_above(value: torch.Tensor, W: torch.Tensor) -> bool:
    """The law: a power iteration's value is a lower bound, up to the rounding of its own arithmetic."""
    exact = torch.linalg.svdvals(W.double())[:, 0]
    return bool((value.double() <= exact * (1 + 64 * torch.finfo(W.dtype).eps)).all())


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_step_is_a_lower_bound_and_the_start_is_within_one_per_cent(name, dtype, generator):
    W = stacks(dtype)[name]
    v = top_right_vectors(W, generator)
    torch.testing.assert_close(v.norm(dim=1), torch.ones(len(W), dtype=dtype))
    _, w = power_step(W, v)
    value = w.double().norm(dim=1)
    assert never_above(value, W)
    exact = torch.linalg.svdvals(W.double())[:, 0]
    assert (value >= 0.99 * exact).all()


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_any_vector_gives_a_lower_bound(name, dtype, generator):
    W = stacks(dtype)[name]
    v = torch.nn.functional.normalize(torch.randn(len(W), W.shape[2], generator=generator, dtype=dtype))
    for _ in range(5):
        _, w = power_step(W, v)
        assert never_above(w.double().norm(dim=1), W)
        v = torch.nn.functional.normalize(w, eps=0) if (w != 0).all() else v


def test_the_law_catches_a_planted_value_that_is_one_thousandth_too_large(generator):
    W = stacks(torch.float64)["wide"]
    _, w = power_step(W, top_right_vectors(W, generator))
    assert not never_above(1.001 * w.norm(dim=1), W)


def test_the_same_generator_gives_the_same_vectors():
    W = stacks(torch.float64)["tall"]
    first, second = (top_right_vectors(W, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
