"""Batched augmentation on the device, with all random numbers from an explicit generator."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor
from torch.nn.functional import one_hot, pad

from specguard.errors import ConfigError

Images = Float[Tensor, "batch channel height width"]
Samples = Shaped[Tensor, "batch *shape"]  # images, or sentences
Targets = Float[Tensor, "batch class_"]


@dataclass(frozen=True)
class Augmentation:
    """Random changes of a batch of images in [0, 1]; the defaults change nothing.

    Args:
        crop: pixels of zero padding, from which a random window of the original size is cut
        flip: mirror each image, left to right, with probability 1/2
        jitter: width of the random factors of brightness, contrast and saturation (0.4: from 0.6 to 1.4)
        hue: largest rotation of the hue in turns (0.1: 36 degrees), in YIQ space
        mixup: parameter of the Beta distribution of the mixing weight; 0 for no mixup
        cutmix: the same for cutmix
        mix_probability: fraction of batches that are mixed, half of them by each of mixup and cutmix if both are on

    Example:
        >>> import torch
        >>> from specguard.data import Augmentation
        >>> augmentation = Augmentation(crop=1, flip=True)
        >>> images, labels = torch.rand(2, 3, 8, 8), torch.tensor([0, 1])
        >>> changed, targets = augmentation(images, labels, classes=2, generator=torch.Generator().manual_seed(0))
        >>> changed.shape, targets.tolist()
        (torch.Size([2, 3, 8, 8]), [[1.0, 0.0], [0.0, 1.0]])
    """

    crop: int = 0
    flip: bool = False
    jitter: float = 0.0
    hue: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0

    def __post_init__(self) -> None:
        for name in ("crop", "jitter", "hue", "mixup", "cutmix"):
            if not 0 <= getattr(self, name) <= 1e6:  # NaN compares false
                raise ConfigError(
                    f"augmentation {name} must lie between 0 and a million, not {getattr(self, name)}"
                )
        if not 0 <= self.mix_probability <= 1:
            raise ConfigError(f"mix_probability must lie in [0, 1], not {self.mix_probability}")

    @property
    def mixes(self) -> bool:
        """Whether an image can depend on others of its batch."""
        return bool(self.mixup or self.cutmix)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ConfigError for samples of a shape that these changes do not support; sentences support none."""
        if len(shape) == 1:
            if self != Augmentation():
                raise ConfigError("crops, flips, colors and mixtures are for images, not for sentences")
            return
        if (self.jitter or self.hue) and shape[0] != 3:
            raise ConfigError(f"color jitter needs 3 channels, not {shape[0]}")
        if self.crop > min(shape[1:]):
            raise ConfigError(f"a padding of {self.crop} pixels is too large for images of {shape[1]} x {shape[2]}")

    def __call__(
        self, images: Samples, labels: Int64[Tensor, " batch"], classes: int, generator: torch.Generator
    ) -> tuple[Samples, Targets]:
        """The changed images, in [0, 1], and their targets as probabilities; sentences are returned unchanged."""
        self.check(tuple(images.shape[1:]))
        if self.crop:
            images = random_crop(images, self.crop, generator)
        if self.flip:
            images = random_flip(images, generator)
        if self.jitter or self.hue:
            images = color_jitter(images, self.jitter, self.hue, generator)
        targets = one_hot(labels, classes).to(images.dtype if images.is_floating_point() else torch.float32)
        if self.mixes:
            # Decided on the device, without synchronization: a batch that is not mixed gets weight 1.
            draw = _uniform(1, generator, images)
            each = self.mix_probability if not (self.mixup and self.cutmix) else self.mix_probability / 2
            if self.mixup:
                images, targets = mixup(images, targets, self.mixup, generator, draw < each)
            if self.cutmix:
                active = (draw >= self.mix_probability - each) & (draw < self.mix_probability)
                images, targets = cutmix(images, targets, self.cutmix, generator, active)
        return images, targets


def random_crop(images: Images, padding: int, generator: torch.Generator) -> Images:
    """Cut a window of the original size at a random position of each zero-padded image."""
    batch, _, height, width = images.shape
    padded = pad(images, (padding,) * 4)
    options: dict[str, Any] = {"generator": generator, "device": images.device}
    top = torch.randint(2 * padding + 1, (batch, 1, 1), **options)
    left = torch.randint(2 * padding + 1, (batch, 1, 1), **options)
    rows = top + torch.arange(height, device=images.device).view(1, -1, 1)
    columns = left + torch.arange(width, device=images.device).view(1, 1, -1)
    sample = torch.arange(batch, device=images.device).view(-1, 1, 1)
    return padded[sample, :, rows, columns].movedim(3, 1).contiguous()


def random_flip(images: Images, generator: torch.Generator) -> Images:
    """Mirror each image, left to right, with probability 1/2."""
    mirrored = _uniform(len(images), generator, images) < 0.5
    return torch.where(mirrored.view(-1, 1, 1, 1), images.flip(3), images)


def color_jitter(images: Images, width: float, hue: float, generator: torch.Generator) -> Images:
    """Change brightness, contrast and saturation by random factors in [1 - width, 1 + width], then the hue."""
    factors = (1 + width * (2 * _uniform(3 * len(images), generator, images) - 1)).clamp(min=0)
    brightness, contrast, saturation = factors.view(3, -1, 1, 1, 1)
    images = (images * brightness).clamp(0, 1)
    images = (_gray(images).mean((2, 3), keepdim=True).lerp(images, contrast)).clamp(0, 1)
    images = (_gray(images).expand_as(images).lerp(images, saturation)).clamp(0, 1)
    if hue:
        angle = 2 * torch.pi * hue * (2 * _uniform(len(images), generator, images) - 1)
        images = torch.einsum("bij,bjhw->bihw", _hue_rotation(angle), images).clamp(0, 1)
    return images


def mixup(
    images: Images, targets: Targets, alpha: float, generator: torch.Generator, active: Bool[Tensor, "1"]
) -> tuple[Images, Targets]:
    """Where `active`, blend each image with a random partner, one weight per batch (Zhang et al. 2018)."""
    weight, partner = _beta(alpha, generator, images), _partners(images, generator)
    weight = torch.where(active, weight, 1.0)
    return images[partner].lerp(images, weight), targets[partner].lerp(targets, weight)


def cutmix(
    images: Images, targets: Targets, alpha: float, generator: torch.Generator, active: Bool[Tensor, "1"]
) -> tuple[Images, Targets]:
    """Where `active`, replace a rectangle of each image by its partner's, one per batch (Yun et al. 2019)."""
    height, width = images.shape[2:]
    weight, partner = _beta(alpha, generator, images), _partners(images, generator)
    place = _uniform(2, generator, images)
    half = (1 - weight).sqrt() / 2
    rows = (torch.arange(height, device=images.device) + 0.5) / height
    columns = (torch.arange(width, device=images.device) + 0.5) / width
    inside = ((rows - place[0]).abs() < half).view(-1, 1) & ((columns - place[1]).abs() < half) & active
    kept = 1 - inside.to(images.dtype).mean()  # the fraction left, after clipping at the border
    return torch.where(inside, images[partner], images), targets[partner].lerp(targets, kept)


def _uniform(count: int, generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.rand(count, generator=generator, device=like.device, dtype=like.dtype)


def _partners(images: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randperm(len(images), generator=generator, device=images.device)


def _beta(alpha: float, generator: torch.Generator, like: Tensor) -> Tensor:
    """One draw from Beta(alpha, alpha), as a ratio of two Gamma draws; 1 where both of them underflow."""
    shape = torch.full((2,), alpha, device=like.device, dtype=like.dtype)
    first, second = torch._standard_gamma(shape, generator=generator)
    total = (first + second).view(1)
    return torch.where(total > 0, first / total, 1.0)


def _gray(images: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)


def _hue_rotation(angle: Float[Tensor, " batch"]) -> Float[Tensor, "batch 3 3"]:
    """RGB -> YIQ, rotate (I, Q), and back: gray stays gray and brightness is kept."""
    to_yiq = angle.new_tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]])
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], dim=1).view(-1, 3, 3)
    return torch.linalg.inv(to_yiq) @ turn @ to_yiq
