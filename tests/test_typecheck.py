"""The type checks of the tests find what jaxtyping and beartype find, however often a function was right before."""

from dataclasses import dataclass

import pytest
import torch
from jaxtyping import Float, TypeCheckError
from torch import Tensor

from typecheck import checked, tensors


def sums(x: Float[Tensor, "n d"], y: Float[Tensor, "n d"] | None = None, *, lost: int = 0) -> Float[Tensor, "n"]:
    return (x if y is None else x + y).sum(1)[lost:]


@pytest.fixture
def checked_sums():
    found = checked(sums, tensors)
    for n in (2, 3, 2):
        found(torch.ones(n, 4))
        found(torch.ones(n, 4), y=torch.ones(n, 4))
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.ones(2),),
        (torch.ones(2, 4, 1),),
        (torch.ones(2, 4, dtype=torch.int64),),
        (torch.ones(2, 4), torch.ones(3, 4)),
        (torch.ones(2, 4), torch.ones(1, 4)),
        (torch.ones(2, 4), 1.0),
        (None,),
    ],
    ids=str,
)
def test_arguments_of_wrong_shapes_are_found_after_right_ones(checked_sums, arguments):
    for _ in range(2):
        with pytest.raises(TypeCheckError, match="checking the parameters"):
            checked_sums(*arguments)


def test_a_result_of_a_wrong_shape_is_found_though_the_arguments_were_seen_before(checked_sums):
    for _ in range(2):
        with pytest.raises(TypeCheckError, match="checking the return value"):
            checked_sums(torch.ones(3, 4), lost=1)
    assert checked_sums(torch.ones(3, 4)).shape == (3,)


def test_methods_properties_and_fields_are_checked_too():
    @dataclass(frozen=True)
    class Pair:
        first: Float[Tensor, "n"]
        second: Float[Tensor, "n"]

        @property
        def total(self) -> Float[Tensor, ""]:
            return self.first + self.second

        @classmethod
        def twice(cls, x: Float[Tensor, "n"]) -> "Pair":
            return cls(x, x)

    held = checked(Pair, tensors)
    with pytest.raises(TypeCheckError):
        held(torch.ones(2), torch.ones(3))
    total, twice = checked(vars(Pair)["total"], tensors), checked(vars(Pair)["twice"], tensors)
    with pytest.raises(TypeCheckError):
        total.fget(held(torch.ones(2), torch.ones(2)))
    with pytest.raises(TypeCheckError):
        twice.__func__(Pair, torch.ones(2, 2))


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_not_decided_by_the_shape_of_one_value_is_checked_at_every_call(count):
    def stacked(parts: list[Float[Tensor, "n d"]]) -> Float[Tensor, "m d"]:
        return torch.cat(parts)

    found = checked(stacked, tensors)
    found([torch.ones(1, 4)] * count)
    with pytest.raises(TypeCheckError):
        found([torch.ones(1)] * count)


def test_functions_without_shapes_are_left_as_they_are():
    def plain(x: int, y: "str", z: "of_nothing_yet") -> Tensor:
        return torch.ones(x)

    def written_as_text(x: 'Float[Tensor, "n"]') -> Tensor:
        return x

    assert checked(plain, tensors) is plain
    with pytest.raises(TypeCheckError):
        checked(written_as_text, tensors)(torch.ones(2, 2))
    assert checked(sums, tensors) is not sums
