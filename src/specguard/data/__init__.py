"""Data sets as tensors in [0, 1], and augmentation in batches on the device."""

from specguard.data.augment import Augmentation
from specguard.data.cifar import cifar10, cifar100
from specguard.data.dataset import Data, Dataset
from specguard.data.digits import digits
from specguard.data.folder import image_folder
from specguard.data.svhn import svhn

__all__ = ["Augmentation", "Data", "Dataset", "cifar10", "cifar100", "digits", "image_folder", "svhn"]
