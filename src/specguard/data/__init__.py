"""Data sets: images as tensors in [0, 1], sentences as token indices; batched augmentation of images."""

from specguard.data.augment import Augmentation
from specguard.data.cifar import cifar10, cifar100
from specguard.data.dataset import Data, Dataset
from specguard.data.digits import digits
from specguard.data.idx import fashion_mnist, mnist
from specguard.data.image_folder import image_folder
from specguard.data.svhn import svhn
from specguard.data.text import AnyData, Sentences, Split, Text, Vocabulary, sst2

__all__ = [
    "AnyData",
    "Augmentation",
    "Data",
    "Dataset",
    "Sentences",
    "Split",
    "Text",
    "Vocabulary",
    "cifar10",
    "cifar100",
    "digits",
    "fashion_mnist",
    "image_folder",
    "mnist",
    "sst2",
    "svhn",
]
