"""Subsets in which every class has its share: beginnings of one order, which nothing but the labels decides."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from specguard.data import Data, Dataset
from specguard.data.subset import stratified_order
from specguard.errors import ConfigError, DataError
from specguard.records.base import Subset

SIZES = (
    (7, 2, 11),
    (1,),
    (5, 5, 5, 5),
    (100, *[1] * 30),
    (1, 1, 1),
    (50, 30, 20, 10, 5, 3, 2, 1),
    (13, 13, 13, 1, 1, 60),
    (*range(1, 25),),
)
PINNED = [16, 0, 19, 4, 17, 18, 5, 8, 9, 11, 3, 12, 13, 6, 15, 1, 14, 7, 2, 10]
Order = Callable[[Sequence[int], int], list[int]]


def by_class(sizes: Sequence[int]) -> list[int]:
    """Labels as a folder of images has them."""
    return [label for label, size in enumerate(sizes) for _ in range(size)]


def farthest(order: Order, sizes: Sequence[int], seed: int = 0) -> float:
    """How far a class is from its share, in images, at worst over all beginnings."""
    labels = by_class(sizes)
    n, found, worst = len(labels), Counter[int](), 0.0
    for taken, image in enumerate(order(labels, seed), start=1):
        found[labels[image]] += 1
        worst = max(worst, *(abs(found[c] * n - taken * size) / n for c, size in enumerate(sizes)))
    return worst


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("seed", [0, 1, -3, 2**70])
def test_every_beginning_has_every_class_within_one_image_of_its_share(sizes, seed):
    labels = by_class(sizes)
    assert sorted(stratified_order(labels, seed)) == list(range(len(labels)))
    assert farthest(stratified_order, sizes, seed) < 1


def planted_first(labels: Sequence[int], seed: int) -> list[int]:
    return list(range(len(labels)))


def planted_in_turn(labels: Sequence[int], seed: int) -> list[int]:
    """One of each class, as long as it lasts."""
    rank: Counter[int] = Counter()
    keys = []
    for label in labels:
        rank[label] += 1
        keys.append((rank[label], label))
    return sorted(range(len(labels)), key=keys.__getitem__)


def planted_middles(labels: Sequence[int], seed: int) -> list[int]:
    """The j-th of a class at (j - 1/2) / n_c: right for equal classes, and far from it for one among many small."""
    sizes, rank = Counter(labels), Counter[int]()
    keys = []
    for label in labels:
        rank[label] += 1
        keys.append((rank[label] - 0.5) / sizes[label])
    return sorted(range(len(labels)), key=keys.__getitem__)


@pytest.mark.parametrize("order", [planted_first, planted_in_turn, planted_middles])
def test_planted_orders_that_are_not_stratified_are_noticed(order):
    assert max(farthest(order, sizes) for sizes in SIZES) >= 1


def test_the_order_is_the_same_on_every_machine():
    """As it was when the first study was written: what records say must be found again."""
    assert stratified_order(by_class((7, 2, 11)), 0) == PINNED
    assert stratified_order(by_class((7, 2, 11)), 1) != PINNED


def test_labels_in_any_order_are_told_apart_and_names_of_classes_do_not_matter():
    labels = [0, 1] * 10
    assert [labels[image] for image in stratified_order(labels, 0)[:2]] in ([0, 1], [1, 0])
    assert stratified_order([5 + 7 * label for label in labels], 0) == stratified_order(labels, 0)


def test_of_many_equal_classes_a_few_images_are_not_of_the_first_by_name():
    labels = by_class([3] * 100)
    seen = [labels[image] for image in stratified_order(labels, 0)[:20]]
    assert len(set(seen)) == 20
    assert max(seen) > 60


def test_images_of_a_class_are_not_its_first_files():
    order = stratified_order(by_class((100, 100)), 0)
    assert max(image for image in order[:20] if image < 100) > 40


def folder_like(sizes: Sequence[int] = (7, 2, 11)) -> Data:
    labels = torch.tensor(by_class(sizes))
    images = torch.arange(len(labels), dtype=torch.uint8).view(-1, 1, 1, 1)
    return Data("files", Dataset(images, labels), Dataset(images, labels), tuple("abc"), by_class=True)


def test_a_subset_knows_its_images_by_their_numbers_in_the_data_set():
    data = folder_like()
    for count in range(1, 20):
        split = data.take(count)
        assert split.samples.tolist() == split.images.flatten().tolist() == PINNED[:count]
        assert split.labels.tolist() == [data.test.labels[image] for image in PINNED[:count]]
        assert split.to(torch.device("cpu")).samples.tolist() == PINNED[:count]
        assert split.subset is not None
        assert split.subset.record() == Subset(rule="stratified", seed=0, of=20)


def test_all_images_are_the_split_itself_and_the_first_are_the_first():
    data = folder_like()
    assert data.take(20) is data.test
    assert data.take(20, first=True).subset is None
    assert data.take(4, first=True).images.flatten().tolist() == [0, 1, 2, 3]
    assert data.take(4, first=True).subset is None
    for count in (0, 21):
        with pytest.raises(ConfigError, match=f"files has 20 test images, not {count}"):
            data.take(count)


def test_data_that_has_an_order_of_its_own_keeps_it():
    files = folder_like()
    official = Data("official", files.train, files.test, files.classes)
    split = official.take(4)
    assert split.subset is None
    assert split.samples.tolist() == split.images.flatten().tolist() == [0, 1, 2, 3]


def test_training_images_that_are_held_out_leave_the_data_a_folder():
    left, _ = folder_like().held_out(3, torch.Generator().manual_seed(0))
    assert left.by_class
    assert len(left.train) == 17


def test_a_subset_is_not_counted_anew_in_silence():
    with pytest.raises(DataError, match="take fewer images of the whole"):
        folder_like().take(5).select(slice(3))
    split = folder_like().take(5)
    with pytest.raises(DataError, match="a subset of 5 images cannot be these 4"):
        Dataset(split.images[:4], split.labels[:4], split.subset)
