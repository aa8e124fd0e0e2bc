"""The laws of noise that belongs to a sample, run over every kind of draw, and over wrong noise they must catch."""

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specguard.geometry import Ball
from specguard.rng import Noise

DTYPES = (torch.float32, torch.float64)
SHAPES = ((), (1,), (7,), (3, 5), (2, 3, 7), (0,))
SEEDS = (0, 1, -1, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10**30, -(10**30))
IDS = torch.tensor([0, 1, -1, 2, 31, 2**31, 2**63 - 1, -(2**63), 7, 8, 9, 10, 11])

Draw = Callable[[Noise, tuple[int, ...]], Tensor]
DRAWS: dict[str, Draw] = {
    "bits": lambda noise, shape: noise.bits(shape),
    "integers": lambda noise, shape: noise.integers(1000, shape),
    "folded bits": lambda noise, shape: noise.fold(3).bits(shape),
    **{
        f"{kind} {dtype}".replace("torch.", ""): lambda noise, shape, kind=kind, dtype=dtype: getattr(noise, kind)(
            shape, dtype
        )
        for kind in ("uniform", "normal", "signs", "directions")
        for dtype in DTYPES
    },
}
LARGE = 10_000


def numbers(source: type[Noise], draw: str, shape: tuple[int, ...] = (3,), seed: int = 0) -> Tensor:
    return DRAWS[draw](source.of(torch.arange(LARGE), seed), shape)


def one_by_one(noise: Noise) -> list[Noise]:
    return [noise[torch.tensor([i])] for i in range(len(noise))]


def uniform_values(values: Tensor | np.ndarray) -> bool:
    return stats.kstest(np.asarray(values).ravel(), "uniform").pvalue > 1e-3


# The laws. Each takes a class of noise and the name of a draw, and fails by assertion.


def law_a_sample_has_the_same_bits_in_every_batch(source: type[Noise], draw: str) -> None:
    """Alone, in subsets of every size, reversed, repeated and shuffled: no vector width, no neighbor matters."""
    for shape in SHAPES:
        if draw.startswith("directions") and 0 in shape:
            continue
        whole = source.of(IDS, 3)
        together = DRAWS[draw](whole, shape)
        assert together.shape == (len(IDS), *shape)
        for i, alone in enumerate(one_by_one(whole)):
            assert torch.equal(DRAWS[draw](alone, shape)[0], together[i])
        for size in range(1, len(IDS)):
            for start in range(0, len(IDS) - size, 5):
                part = slice(start, start + size)
                assert torch.equal(DRAWS[draw](source.of(IDS[part], 3), shape), together[part])
        order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(1))
        for index in (order, order[:5], order.repeat(3), torch.arange(len(IDS)).flip(0)):
            assert torch.equal(DRAWS[draw](source.of(IDS[index], 3), shape), together[index])
            assert torch.equal(DRAWS[draw](whole[index], shape), together[index])
        mask = IDS > 1
        assert torch.equal(DRAWS[draw](whole[mask], shape), together[mask])


def law_the_number_of_threads_does_not_matter(source: type[Noise], draw: str) -> None:
    threads, drawn = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            drawn.append(DRAWS[draw](source.of(torch.arange(1031), 0), (5, 7)))  # enough to be shared among threads
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*drawn)


def law_asked_again_it_says_the_same_and_leaves_no_trace(source: type[Noise], draw: str) -> None:
    noise, state = source.of(IDS, 5), torch.get_rng_state()
    keys = noise.keys.clone()
    first = DRAWS[draw](noise, (3, 5))
    noise.fold(1).normal((2,), torch.float32)
    assert torch.equal(DRAWS[draw](noise, (3, 5)), first)
    assert torch.equal(noise.keys, keys)
    assert torch.equal(torch.get_rng_state(), state)


def law_a_batch_of_none_has_no_numbers(source: type[Noise], draw: str) -> None:
    none = source.of(torch.arange(0), 0)
    for shape in SHAPES:
        values = DRAWS[draw](none, shape)
        assert values.shape == (0, *shape)
        assert values.dtype == DRAWS[draw](source.of(IDS, 0), (2,)).dtype


def law_seeds_ids_and_folds_of_every_size_give_noise_of_their_own(source: type[Noise], draw: str) -> None:
    """All pairs of a seed and an id, and folds of these: no two draw alike, so that seed + id is no key."""
    rows = []
    for seed in (*SEEDS[:6], *SEEDS[8:], 2, 3, 4, 5):
        noise = source.of(IDS, seed)
        folds = (noise.fold(0), noise.fold(1), noise.fold(-2), noise.fold(10**25), noise.fold(0).fold(0))
        for other in (noise, *folds):
            rows.append(DRAWS[draw](other, (80,)))
    drawn = torch.cat(rows)
    assert len(drawn.unique(dim=0)) == len(drawn)


def law_neighboring_samples_seeds_and_folds_are_uncorrelated(source: type[Noise], draw: str) -> None:
    """Correlations of values and of squares, also with the next entry of the same sample: within 4.5 / sqrt(n)."""
    noise = source.of(torch.arange(LARGE), 0)
    streams = {
        "noise": noise,
        "next id": source.of(torch.arange(LARGE) + 1, 0),
        "next seed": source.of(torch.arange(LARGE), 1),
        "minus seed": source.of(torch.arange(LARGE), -1),
        "fold": noise.fold(0),
        "another fold": noise.fold(1),
        "fold of fold": noise.fold(0).fold(0),
    }
    drawn = {name: DRAWS[draw](stream, (3,)).double() for name, stream in streams.items()}
    pairs = [(f"{a}, {b}", drawn[a][:, 0], drawn[b][:, 0]) for a, b in combinations(drawn, 2)]
    # Entries of a direction do depend on each other: their squares sum to one.
    if not draw.startswith("directions"):
        pairs += [("next entry", drawn["noise"][:, i], drawn["noise"][:, i + 1]) for i in range(2)]
    for (name, one, two), power in ((pair, power) for pair in pairs for power in (1, 2)):
        one, two = one.numpy() ** power, two.numpy() ** power
        if one.std() > 1e-12:  # signs have but one square
            assert abs(np.corrcoef(one, two)[0, 1]) < 4.5 / math.sqrt(LARGE), name


def law_the_distribution_is_what_its_name_says(source: type[Noise], draw: str) -> None:
    kind = draw.split()[0]
    for seed in (0, -5, 2**80):
        values = numbers(source, draw, seed=seed)
        exact = values.double()
        for entry in range(3):
            column = exact[:, entry].numpy()
            if kind == "uniform":
                assert uniform_values(column)
            elif kind == "normal":
                assert stats.kstest(column, "norm").pvalue > 1e-3
            elif kind == "signs":
                assert stats.binomtest(int((column > 0).sum()), LARGE).pvalue > 1e-3
            elif kind == "directions":  # Archimedes: the height of a point of the sphere is uniform
                assert uniform_values((column + 1) / 2)
            elif kind == "integers":
                assert stats.chisquare(np.bincount(values[:, entry], minlength=1000)).pvalue > 1e-3
        if kind == "uniform":
            assert ((values > 0) & (values < 1)).all()
            assert len(values.unique()) > 0.98 * values.numel(), "a fine grid"
        elif kind == "normal":
            tail = int((exact.abs() > 3).sum())
            assert stats.binomtest(tail, exact.numel(), 2 * stats.norm.sf(3)).pvalue > 1e-3
        elif kind == "signs":
            assert set(values.unique().tolist()) == {-1.0, 1.0}
        elif kind == "directions":
            tolerance = 1e-6 if values.dtype == torch.float32 else 1e-14
            np.testing.assert_allclose(np.linalg.norm(exact.numpy(), axis=1), 1, atol=tolerance)
            assert np.abs(np.corrcoef(exact.numpy().T) - np.eye(3)).max() < 0.03
        elif kind == "integers":
            assert values.aminmax() == (0, 999)
        else:
            ones = ((values.unsqueeze(-1) >> torch.arange(64)) & 1).sum((0, 1)).numpy()
            assert (np.abs(ones - values.numel() / 2) < 4.5 * math.sqrt(values.numel()) / 2).all(), "every bit"


LAWS = {name: law for name, law in list(globals().items()) if name.startswith("law_")}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("law", LAWS.values(), ids=[name.removeprefix("law_") for name in LAWS])
def test_every_draw_obeys_the_law_that(law, draw):
    law(Noise, draw)


def test_the_bits_are_those_of_splitmix64():
    """The stream of the published generator with seed 1234567, after its first number."""
    published = [3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    found = Noise(torch.tensor([1234567])).bits((4,))[0].tolist()
    assert [number % 2**64 for number in found] == published


def test_one_bit_of_a_seed_an_id_or_a_fold_turns_half_of_all_bits():
    ids = torch.arange(200)
    base = Noise.of(ids, 12345)
    for bit in range(63):
        for other in (Noise.of(ids, 12345 ^ 1 << bit), Noise.of(ids ^ 1 << bit, 12345), base.fold((1 << bit) - 1)):
            before, after = (noise.bits((1,)).numpy().view(np.uint64) for noise in (base, other))
            turned = np.unpackbits((before ^ after).view(np.uint8)).mean()
            assert abs(turned - 0.5) < 4.5 * 0.5 / math.sqrt(64 * len(ids))


def test_normal_numbers_are_those_of_box_and_muller_by_numpy():
    """Radius sqrt(-2 log u) and angle, with numpy's own logarithm, sine and cosine."""
    noise = Noise.of(torch.arange(20_000), 4)
    first, second = (source.bits((1,)).numpy().view(np.uint64) for source in (noise, noise.fold(0)))
    radius = np.sqrt(-2 * np.log(((first >> np.uint64(12)) + 0.5) / 2.0**52))
    angle = (((second >> np.uint64(14)) + 0.5) / 2.0**50 - 0.5) * np.pi / 2
    side = np.where(second & np.uint64(1), 1.0, -1.0)
    expected = radius * side * np.where(second & np.uint64(2), np.sin(angle), np.cos(angle))
    np.testing.assert_allclose(noise.normal((1,), torch.float64), expected, rtol=1e-11, atol=1e-13)


def test_no_key_makes_a_normal_number_infinite():
    """The extreme bits: u next to 0 and next to 1."""
    from specguard.rng import _logarithm, _open_interval

    extreme = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 4095, 4096, -4096])
    for digits in (23, 50, 52):
        u = _open_interval(extreme, digits)
        assert ((u > 0) & (u < 1)).all()
        np.testing.assert_allclose(_logarithm(u).numpy(), np.log(u.numpy()), rtol=1e-11, atol=1e-16)
        assert ((u.float() > 0) & (u.float() < 1)).all() or digits > 23


def test_float32_numbers_are_those_of_float64_rounded():
    """Signs, normals and directions; uniforms have a grid of their own, within its mesh."""
    noise = Noise.of(IDS, 2)
    for kind in ("normal", "signs", "directions"):
        single, double = (getattr(noise, kind)((5, 3), dtype) for dtype in DTYPES)
        assert (single.dtype, double.dtype) == DTYPES
        assert torch.equal(single, double.float())
    single, double = (noise.uniform((5, 3), dtype) for dtype in DTYPES)
    assert (single.dtype, double.dtype) == DTYPES
    assert ((single.double() - double).abs() <= 2.0**-24).all()


@pytest.mark.parametrize("high", [1, 2, 3, 7, 256, 2**31 - 1])
def test_integers_cover_their_range_evenly(high):
    values = Noise.of(torch.arange(LARGE), high).integers(high, ())
    assert values.dtype == torch.int64
    assert ((values >= 0) & (values < high)).all()
    counts = np.histogram(values.numpy(), bins=min(high, 100), range=(0, high))[0]
    if high == 256:
        counts = np.bincount(values.numpy(), minlength=256)
    if len(counts) > 1:
        assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("size", [1, 2, 5, 24])
def test_the_entries_of_a_direction_have_the_law_of_a_sphere_in_every_dimension(size):
    """The square of an entry is Beta(1/2, (n - 1)/2); an angle of the plane is uniform; a line has two ends."""
    drawn = Noise.of(torch.arange(LARGE), 6).directions((size,), torch.float64).numpy()
    if size == 1:
        assert set(np.unique(drawn)) == {-1.0, 1.0}
        assert stats.binomtest(int((drawn > 0).sum()), LARGE).pvalue > 1e-3
        return
    for entry in (0, size - 1):
        assert stats.kstest(drawn[:, entry] ** 2, stats.beta(0.5, (size - 1) / 2).cdf).pvalue > 1e-3
        assert stats.binomtest(int((drawn[:, entry] > 0).sum()), LARGE).pvalue > 1e-3
    if size == 2:
        assert uniform_values(np.arctan2(drawn[:, 1], drawn[:, 0]) / (2 * np.pi) + 0.5)


def test_a_direction_that_is_a_single_number_is_a_sign():
    drawn = Noise.of(IDS, 1).directions((), torch.float64)
    assert drawn.shape == IDS.shape
    assert set(drawn.tolist()) == {-1.0, 1.0}


def test_a_sample_without_entries_has_a_direction_without_entries():
    assert Noise.of(IDS, 1).directions((0,), torch.float64).shape == (len(IDS), 0)


def test_the_first_number_over_all_ids_all_seeds_or_all_folds_is_uniform():
    """Not only along one stream: across streams, where a weak hash would show a lattice."""
    ids, scalar = torch.arange(LARGE), torch.zeros(1, dtype=torch.int64)
    across = {
        "ids": Noise.of(ids, 0).uniform((), torch.float64),
        "ids with gaps": Noise.of(ids << 32, 0).uniform((), torch.float64),
        "negative ids": Noise.of(-ids, 0).uniform((), torch.float64),
        "seeds": torch.cat([Noise.of(scalar, seed).uniform((), torch.float64) for seed in range(1000)]),
        "folds": torch.cat([Noise.of(scalar, 0).fold(k).uniform((), torch.float64) for k in range(1000)]),
    }
    for name, values in across.items():
        assert uniform_values(values), name
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 4.5 / math.sqrt(len(values)), name


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sample_of_a_ball_has_the_same_bits_in_every_batch(norm, dtype):
    """What attacks start from; the images may lie anywhere in memory."""
    ball, noise = Ball(norm, 0.3), Noise.of(IDS, 8)
    images = torch.rand(len(IDS), 2, 3, 5, generator=torch.Generator().manual_seed(2), dtype=dtype)
    together = ball.sample(images, noise)
    for i, alone in enumerate(one_by_one(noise)):
        assert torch.equal(ball.sample(images[i : i + 1], alone)[0], together[i])


# The testers, tested: each wrong noise differs from the right one in one place, and a law must say so.


class Kept(Noise):
    """Right, and of the same class after a fold and an index, so that what is wrong stays wrong."""

    def fold(self, number):
        return type(self)(super().fold(number).keys)

    def __getitem__(self, index):
        return type(self)(self.keys[index])


class FromAGenerator(Kept):
    """Numbers in the order in which they are asked for, as torch hands them out."""

    def bits(self, shape):
        generator = torch.Generator().manual_seed(int(self.keys[:1].sum()) % 2**63)
        return torch.randint(-(2**63), 2**63 - 1, (len(self), *shape), generator=generator)


class LooksAtTheNeighbors(Kept):
    def bits(self, shape):
        return Noise(self.keys ^ self.keys.sum() * (len(self) > 1)).bits(shape)


class DependsOnTheBatchSize(Kept):
    def bits(self, shape):
        return Noise(self.keys + len(self)).bits(shape)


class CountsItsCalls(Kept):
    calls = 0

    def bits(self, shape):
        CountsItsCalls.calls += 1
        return Noise(self.keys + CountsItsCalls.calls).bits(shape)


class AddsSeedAndId(Kept):
    @classmethod
    def of(cls, ids, seed):
        return cls(ids + (seed + 2**63) % 2**64 - 2**63)


class IgnoresTheSeed(Kept):
    @classmethod
    def of(cls, ids, seed):
        return cls(Noise.of(ids, 0).keys)


class FoldsToItself(Kept):
    def fold(self, number):
        return type(self)(Noise.fold(self, 0).keys)


class FollowsTheNextId(Kept):
    """Streams that overlap: sample i + 1 begins where sample i began, one number on."""

    @classmethod
    def of(cls, ids, seed):
        return cls((ids - seed * 1000) * -0x61C8864680B583EB)

    def uniform(self, shape, dtype):
        one, two = Noise(self.keys), Noise(self.keys - 0x61C8864680B583EB)
        return (Noise.uniform(one, shape, dtype) + Noise.uniform(two, shape, dtype)) / 2


class HasACoarseGrid(Kept):
    def uniform(self, shape, dtype):
        return (super().uniform(shape, dtype) * 64).floor() / 64


class ReachesTheEnds(Kept):
    def uniform(self, shape, dtype):
        values = super().uniform(shape, dtype)
        return torch.where(values < 1e-4, 0.0, values)


class IsTooWide(Kept):
    def normal(self, shape, dtype):
        return 1.03 * super().normal(shape, dtype)


class HasNoTails(Kept):
    def normal(self, shape, dtype):
        return super().normal(shape, dtype).clamp(-3, 3)


class LeansToOneSide(Kept):
    def signs(self, shape, dtype):
        return torch.where(self.uniform(shape, torch.float64) < 0.52, 1.0, -1.0).to(dtype)


class MissesTheTop(Kept):
    def integers(self, high, shape):
        return super().integers(high - 1, shape)


class PointsToTheCorners(Kept):
    def directions(self, shape, dtype):
        drawn = 2 * self.uniform(shape, dtype) - 1
        return drawn / drawn.flatten(1).norm(dim=1).view(-1, *[1] * len(shape))


PLANTED = [
    (FromAGenerator, "uniform float64", law_a_sample_has_the_same_bits_in_every_batch),
    (FromAGenerator, "directions float32", law_a_sample_has_the_same_bits_in_every_batch),
    (LooksAtTheNeighbors, "normal float32", law_a_sample_has_the_same_bits_in_every_batch),
    (DependsOnTheBatchSize, "signs float32", law_a_sample_has_the_same_bits_in_every_batch),
    (CountsItsCalls, "uniform float32", law_asked_again_it_says_the_same_and_leaves_no_trace),
    (AddsSeedAndId, "bits", law_seeds_ids_and_folds_of_every_size_give_noise_of_their_own),
    (AddsSeedAndId, "uniform float64", law_neighboring_samples_seeds_and_folds_are_uncorrelated),
    (IgnoresTheSeed, "bits", law_seeds_ids_and_folds_of_every_size_give_noise_of_their_own),
    (FoldsToItself, "bits", law_seeds_ids_and_folds_of_every_size_give_noise_of_their_own),
    (FoldsToItself, "normal float64", law_neighboring_samples_seeds_and_folds_are_uncorrelated),
    (FollowsTheNextId, "uniform float64", law_neighboring_samples_seeds_and_folds_are_uncorrelated),
    (HasACoarseGrid, "uniform float32", law_the_distribution_is_what_its_name_says),
    (ReachesTheEnds, "uniform float64", law_the_distribution_is_what_its_name_says),
    (IsTooWide, "normal float64", law_the_distribution_is_what_its_name_says),
    (HasNoTails, "normal float32", law_the_distribution_is_what_its_name_says),
    (LeansToOneSide, "signs float64", law_the_distribution_is_what_its_name_says),
    (MissesTheTop, "integers", law_the_distribution_is_what_its_name_says),
    (PointsToTheCorners, "directions float64", law_the_distribution_is_what_its_name_says),
]


@pytest.mark.parametrize(
    ("wrong", "draw", "law"), PLANTED, ids=[f"{w.__name__}-{d}-{law.__name__}" for w, d, law in PLANTED]
)
def test_planted_wrong_noise_is_caught(wrong, draw, law):
    law(Kept, draw)
    with pytest.raises(AssertionError):
        law(wrong, draw)
