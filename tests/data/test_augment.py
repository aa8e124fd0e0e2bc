"""Augmentation against a slow path: one image at a time, in plain Python."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.functional import one_hot

from specguard.data import Augmentation
from specguard.data.augment import color_jitter, random_crop, random_flip
from specguard.errors import ConfigError

BATCH, CHANNELS, HEIGHT, WIDTH, CLASSES = 7, 3, 9, 13, 10
KINDS = {
    "crop": Augmentation(crop=2),
    "flip": Augmentation(flip=True),
    "jitter": Augmentation(jitter=0.4),
    "strong jitter": Augmentation(jitter=3.0),
    "hue": Augmentation(hue=0.1),
    "any hue": Augmentation(hue=0.5),
    "mixup": Augmentation(mixup=0.8),
    "cutmix": Augmentation(cutmix=1.0),
    "mixup or cutmix": Augmentation(mixup=0.8, cutmix=1.0, mix_probability=0.9),
    "all": Augmentation(crop=4, flip=True, jitter=0.4, hue=0.1, mixup=0.2, cutmix=1.0, mix_probability=0.5),
}
kinds = pytest.mark.parametrize("kind", KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def pictures(batch=BATCH, dtype=torch.float32, seed=0):
    return torch.rand(batch, CHANNELS, HEIGHT, WIDTH, generator=seeded(seed), dtype=dtype)


def constant_pictures(batch=BATCH):
    """Image i has the value i / batch everywhere, so that every pixel tells which image it is from."""
    return (torch.arange(batch) / batch).view(-1, 1, 1, 1).expand(-1, CHANNELS, HEIGHT, WIDTH).contiguous()


def run(augmentation, images, seed, labels=None):
    labels = torch.arange(len(images)) if labels is None else labels
    return augmentation(images, labels, max(CLASSES, len(images)), seeded(seed))


@kinds
def test_the_same_generator_state_gives_the_same_result_and_another_seed_another(kind):
    images = pictures()
    first, again, other = (run(KINDS[kind], images, seed) for seed in (3, 3, 4))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], other[0])


@kinds
def test_the_generator_that_is_given_is_the_only_source_of_chance(kind):
    images, results = pictures(), []
    with torch.random.fork_rng(devices=[]):
        for world in (1, 2):
            torch.manual_seed(world)
            before = torch.get_rng_state()
            results.append(run(KINDS[kind], images, 5)[0])
            assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*results)


@kinds
@dtypes
def test_pixels_stay_in_the_unit_range_and_targets_are_probabilities(kind, dtype):
    for seed, images in enumerate([pictures(dtype=dtype), pictures(dtype=dtype).round(), 1 - 1e-7 * pictures()]):
        before = images.clone()
        changed, targets = run(KINDS[kind], images, seed)
        assert (changed.shape, changed.dtype) == (images.shape, images.dtype)
        assert (targets.shape, targets.dtype) == ((BATCH, CLASSES), images.dtype)
        assert 0 <= changed.min() <= changed.max() <= 1
        assert 0 <= targets.min() <= targets.max() <= 1
        torch.testing.assert_close(targets.sum(1), torch.ones(BATCH, dtype=images.dtype))
        assert torch.equal(images, before), "the given images were changed in place"


@kinds
def test_a_single_image_is_a_batch_too(kind):
    changed, targets = run(KINDS[kind], pictures(batch=1), 0)
    assert changed.shape == (1, CHANNELS, HEIGHT, WIDTH)
    assert torch.equal(targets, one_hot(torch.tensor([0]), CLASSES).float())


def test_the_default_changes_nothing():
    images, labels = pictures(), torch.tensor([3, 1, 4, 1, 5, 9, 2])
    changed, targets = run(Augmentation(), images, 0, labels)
    assert torch.equal(changed, images)
    assert torch.equal(targets, one_hot(labels, CLASSES).float())


@pytest.mark.parametrize("padding", [1, 2, 5])
def test_a_crop_is_a_window_of_the_padded_image_and_every_window_is_drawn_about_equally_often(padding):
    side, batch = 2 * padding + 1, 400
    images = pictures(batch)
    cropped = random_crop(images, padding, seeded(padding)).numpy()
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    counts = np.zeros((side, side), dtype=int)
    for image, whole in zip(cropped, padded, strict=True):
        windows = [
            (top, left)
            for top in range(side)
            for left in range(side)
            if np.array_equal(image, whole[:, top : top + HEIGHT, left : left + WIDTH])
        ]
        assert len(windows) == 1
        counts[windows[0]] += 1
    assert stats.chisquare(counts.ravel()).pvalue > 1e-3
    assert counts.sum(0).all()
    assert counts.sum(1).all()


def test_a_flip_is_the_image_or_its_mirror_and_about_half_are_mirrored():
    images = pictures(batch=2000)
    flipped = random_flip(images, seeded(0)).numpy()
    mirrored = 0
    for image, before in zip(flipped, images.numpy(), strict=True):
        mirror = before[:, :, ::-1]
        assert np.array_equal(image, before) != np.array_equal(image, mirror)
        mirrored += np.array_equal(image, mirror)
    assert 900 < mirrored < 1100


def slow_jitter(image, brightness, contrast, saturation, angle):
    """One image of three lists of rows, by the textbook, in float64."""

    def gray(x):
        return 0.299 * x[0] + 0.587 * x[1] + 0.114 * x[2]

    x = np.clip(image * brightness, 0, 1)
    mean = gray(x).mean()
    x = np.clip(mean + contrast * (x - mean), 0, 1)
    x = np.clip(gray(x) + saturation * (x - gray(x)), 0, 1)
    to_yiq = np.array([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    y, i, q = np.tensordot(to_yiq, x, 1)
    turned = np.stack([y, i * np.cos(angle) - q * np.sin(angle), i * np.sin(angle) + q * np.cos(angle)])
    return np.clip(np.tensordot(np.linalg.inv(to_yiq), turned, 1), 0, 1)


@pytest.mark.parametrize(("width", "hue"), [(0.4, 0.0), (0.0, 0.1), (0.3, 0.5), (2.0, 0.25)])
def test_jitter_is_that_of_the_slow_path_with_factors_of_its_own_for_each_image(width, hue):
    images = pictures(dtype=torch.float64)
    changed = color_jitter(images, width, hue, seeded(6))
    draws = seeded(6)
    # The draws, in the order of the documentation: brightness, contrast, saturation of all images, then the hue.
    factors = 1 + width * (2 * torch.rand(3, BATCH, generator=draws, dtype=torch.float64).numpy() - 1)
    angles = 2 * math.pi * hue * (2 * torch.rand(BATCH, generator=draws, dtype=torch.float64).numpy() - 1)
    for i in range(BATCH):
        expected = slow_jitter(images[i].numpy(), *factors[:, i].clip(0), angles[i] if hue else 0.0)
        np.testing.assert_allclose(changed[i].numpy(), expected, atol=1e-12)


def test_jitter_of_width_0_and_hue_0_is_the_identity():
    images = pictures()
    assert torch.equal(color_jitter(images, 0.0, 0.0, seeded(1)), images)


@pytest.mark.parametrize("hue", [0.05, 0.5])
def test_turning_the_hue_keeps_gray_gray_and_brightness_as_it_was(hue):
    gray = pictures()[:, :1].expand(-1, 3, -1, -1)
    torch.testing.assert_close(color_jitter(gray, 0.0, hue, seeded(2)), gray.contiguous(), atol=2e-6, rtol=0)
    faint = 0.5 + 0.1 * (pictures() - 0.5)  # so that nothing is clamped
    turned = color_jitter(faint, 0.0, hue, seeded(2))
    weights = torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)
    torch.testing.assert_close((turned * weights).sum(1), (faint * weights).sum(1), atol=2e-6, rtol=0)
    assert not torch.allclose(turned, faint, atol=1e-3)


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("augmentation", [Augmentation(jitter=0.1), Augmentation(hue=0.1)])
def test_colors_without_three_channels_are_a_config_error(channels, augmentation):
    images = torch.full((BATCH, channels, HEIGHT, WIDTH), 0.5)
    with pytest.raises(ConfigError, match=f"3 channels, not {channels}"):
        run(augmentation, images, 0)


@dtypes
@pytest.mark.parametrize("alpha", [0.01, 0.2, 1.0, 8.0])
def test_mixup_blends_images_just_as_it_blends_their_targets(dtype, alpha):
    images = pictures(dtype=dtype)
    for seed in range(10):
        mixed, targets = run(Augmentation(mixup=alpha), images, seed)
        # Label i is image i, so the targets say what must have been mixed.
        expected = torch.einsum("ij,jchw->ichw", targets[:, :BATCH], images)
        torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=0)
        assert (targets > 0).sum(1).max() <= 2
        own = targets.diagonal()
        assert len(own[own < 1].unique()) <= 1, "one weight for the batch"


def test_equal_labels_stay_certain_whatever_is_mixed():
    labels = torch.full((BATCH,), 4)
    for kind in ("mixup", "cutmix"):
        _, targets = run(KINDS[kind], pictures(), 1, labels)
        torch.testing.assert_close(targets, one_hot(labels, CLASSES).float())


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_the_mixing_weight_is_beta_distributed(alpha):
    weights = []
    for seed in range(400):
        own = run(Augmentation(mixup=alpha), pictures(dtype=torch.float64), seed)[1].diagonal()
        weights += own[own < 1][:1].tolist()  # none where every image is its own partner
    assert len(weights) > 390
    assert stats.kstest(weights, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_cutmix_replaces_one_rectangle_whose_share_is_the_weight_of_the_partner():
    shares = []
    for seed in range(60):
        images = constant_pictures()
        mixed, targets = run(Augmentation(cutmix=1.0), images, seed)
        masks = set()
        for i in range(BATCH):
            replaced = (mixed[i] != images[i]).numpy()
            assert (replaced == replaced[0]).all(), "all channels alike"
            sources = mixed[i][torch.from_numpy(replaced)].unique()
            if len(sources) == 0:  # its own partner, or an empty rectangle
                assert torch.equal(targets[i], one_hot(torch.tensor(i), CLASSES).float())
                continue
            assert len(sources) == 1
            partner = round(float(sources[0]) * BATCH)
            share = replaced[0].mean()
            assert targets[i, partner] == pytest.approx(share, abs=1e-6)
            assert targets[i, i] == pytest.approx(1 - share, abs=1e-6)
            rows, columns = replaced[0].any(1), replaced[0].any(0)
            np.testing.assert_array_equal(replaced[0], np.outer(rows, columns))
            for edge in (rows, columns):
                assert np.count_nonzero(np.diff(edge.astype(int), prepend=0, append=0)) == 2, "one interval"
            masks.add(replaced[0].tobytes())
            shares.append(share)
        assert len(masks) <= 1, "one rectangle for the batch"
    assert min(shares) < 0.1
    assert max(shares) > 0.7


def test_a_weight_of_one_half_cuts_out_one_half_of_the_image_unless_the_border_is_in_the_way():
    shares = []
    for seed in range(60):
        own = run(Augmentation(cutmix=1e4), constant_pictures(), seed)[1].diagonal()
        shares.append(1 - float(own.min()))
    assert max(shares) == pytest.approx(0.5, abs=0.1)
    assert min(shares) >= 0.1


def test_cutmix_takes_the_partners_pixels_from_the_same_place():
    images = pictures()
    for seed in range(10):
        mixed, targets = run(Augmentation(cutmix=1.0), images, seed)
        for i in range(BATCH):
            partner = int(targets[i].index_fill(0, torch.tensor(i), -1).argmax()) if targets[i, i] < 1 else i
            assert ((mixed[i] == images[i]) | (mixed[i] == images[partner])).all()


@pytest.mark.parametrize("kind", ["mixup", "cutmix", "mixup or cutmix"])
def test_a_mix_probability_of_0_changes_nothing(kind):
    settings = KINDS[kind]
    never = Augmentation(mixup=settings.mixup, cutmix=settings.cutmix, mix_probability=0.0)
    images = pictures()
    for seed in range(20):
        changed, targets = run(never, images, seed)
        assert torch.equal(changed, images)
        assert torch.equal(targets, one_hot(torch.arange(BATCH), CLASSES).float())


def how_mixed(augmentation, seed):
    """Of images of one value each: a blend has values that no image had, a cut leaves two values in one image."""
    images = constant_pictures()
    mixed, targets = run(augmentation, images, seed)
    if torch.equal(targets, one_hot(torch.arange(BATCH), CLASSES).float()):
        assert torch.equal(mixed, images)
        return "none"
    blended = not torch.isin(mixed, images).all()
    cut = any(len(image.unique()) > 1 for image in mixed)
    return {(True, False): "mixup", (False, True): "cutmix"}.get((blended, cut), "neither one nor the other")


SEEDS = range(200)


@pytest.mark.parametrize("probability", [0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("names", [("mixup",), ("cutmix",), ("mixup", "cutmix")], ids=" and ".join)
def test_the_share_of_mixed_batches_is_the_mix_probability_and_two_kinds_get_half_each(names, probability):
    # Weights near 1/2, so that a mixed batch is seen to be mixed.
    augmentation = Augmentation(**dict.fromkeys(names, 5.0), mix_probability=probability)
    found = [how_mixed(augmentation, seed) for seed in SEEDS]
    for name in names:
        expected = probability / len(names)
        error = 3.5 * math.sqrt(expected * (1 - expected) / len(SEEDS)) + 0.01
        assert found.count(name) / len(SEEDS) == pytest.approx(expected, abs=error)
    assert set(found) <= {"none", *names}


WRONG = [
    {"crop": -1},
    *({field: value} for field in ("jitter", "hue", "mixup", "cutmix") for value in (-0.1, math.nan, math.inf)),
    *({"mix_probability": value} for value in (-0.01, 1.01, math.nan, math.inf)),
]


@pytest.mark.parametrize("setting", WRONG, ids=str)
def test_a_wrong_setting_is_a_config_error_that_names_it(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Augmentation(**setting)
