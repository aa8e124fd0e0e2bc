"""The baseline of every table: a linear classifier on the pixels, whose certified radius is exact.

The decision boundary between the label y and another class j is a hyperplane at distance `margin / ||w_y - w_j||*`,
without search or remainder.
"""

import torch
from jaxtyping import Float
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.utils import skip_init

from specguard.certificates.node import FLOOR, check_magnitude
from specguard.data import Dataset
from specguard.errors import DataError
from specguard.geometry import Norm
from specguard.inputs import ImagesLike, LabelsLike, as_images, as_labels
from specguard.linalg import UNIT, gamma, round_up, upper_length

_ITERATIONS = 2000


def fit_linear(train: Dataset, classes: int) -> nn.Sequential:
    """Fit a logistic regression on the pixels of `train`, with scikit-learn's default regularization.

    Args:
        train: training images and labels.
        classes: number of classes, each of which must occur in `train`.

    Returns:
        `Flatten` and `Linear` in eval mode, with the float32 weights that are certified.

    Example:
        >>> import torch
        >>> from specguard.certificates import fit_linear
        >>> from specguard.data import Dataset
        >>> train = Dataset(torch.tensor([0.1, 0.9]).view(2, 1, 1, 1), torch.tensor([0, 1]))
        >>> fit_linear(train, 2)(train.images).argmax(1)
        tensor([0, 1])
    """
    counts = torch.bincount(train.labels, minlength=classes)
    if classes < 2 or len(counts) > classes or not bool((counts > 0).all()):
        raise DataError(f"a linear classifier of {classes} classes needs training images of each, and of no other")
    images, labels = train.batch(slice(0, len(train)))
    regression = LogisticRegression(max_iter=_ITERATIONS).fit(images.flatten(1).cpu().numpy(), labels.cpu().numpy())
    W, b = torch.from_numpy(regression.coef_), torch.from_numpy(regression.intercept_)
    if classes == 2:  # scikit-learn returns the logit of the second class minus the first
        W, b = torch.cat([torch.zeros_like(W), W]), torch.cat([torch.zeros_like(b), b])
    layer = skip_init(nn.Linear, W.shape[1], classes)  # draws no random numbers
    with torch.no_grad():
        layer.weight.copy_(W)
        layer.bias.copy_(b)
    return nn.Sequential(nn.Flatten(), layer).eval().requires_grad_(False)


def lower_linear_radii(
    layer: nn.Linear, images: ImagesLike, labels: LabelsLike, norm: Norm = "l2"
) -> Float[Tensor, " batch"]:
    """The distance of each image from the decision boundary of a linear layer; 0 where it is misclassified.

    `min_j (<w_y - w_j, x> + b_y - b_j) / ||w_y - w_j||*`, with the dual norm: l2 for l2, l1 for linf. For a class j
    with the same weights as y, the radius is infinite or 0.

    Guarantee: lower bound on the distance to the boundary of the exact function of the stored weights; float64,
    rounding included; exact up to that. The box of pixels is not used.
    Cost: one product with every pair of classes.
    Reference: Hölder, as in the ledger under `linear-distance`.

    Args:
        layer: the classifier on flattened images.
        images: a batch of images.
        labels: the class of every image.
        norm: of the perturbation, "l2" or "linf".

    Returns:
        One radius per image.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from specguard.certificates import lower_linear_radii
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> layer.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> lower_linear_radii(layer, torch.tensor([[0.5, 0.2]]), torch.tensor([0])).round(decimals=6)
        tensor([0.5000], dtype=torch.float64)
    """
    images = as_images(images, model=layer, box=False, exact=True)
    labels = as_labels(labels, len(images)).to(images.device)
    if len(labels) and int(labels.max()) >= layer.out_features:
        raise DataError(f"every image needs one label from 0 to {layer.out_features - 1}")
    x, W = images.flatten(1).double(), layer.weight.detach().double()
    b = W.new_zeros(len(W)) if layer.bias is None else layer.bias.detach().double()
    if not (W.isfinite().all() and b.isfinite().all()):
        raise DataError("the weights have entries that are not finite")
    for what, values in (("an image", x), ("the weight", W), ("the bias", b)):
        check_magnitude(f"the largest entry of {what}", float(values.abs().max()))
    radius = x.new_full((len(x),), torch.inf)
    for other in range(len(W)):
        D, c = W[labels] - W[other], b[labels] - b[other]  # one rounding of each entry
        magnitude = round_up((D.abs() * x.abs()).sum(1) + b[labels].abs() + b[other].abs(), len(W.mT) + 8)
        # Differences, products, their sum and the bias: (entries + 4) roundings at most on any path.
        margin = (D * x).sum(1) + c - gamma(len(W.mT) + 8) * magnitude - FLOOR
        rate = upper_length(D) if norm == "l2" else round_up(D.abs().sum(1), D.shape[1] + 8)
        rate = round_up(rate, 8)  # for the rounding of D
        distance = torch.where(rate > 0, margin / rate * (1 - 8 * UNIT), torch.where(margin > 0, torch.inf, 0.0))
        radius = torch.where(labels == other, radius, torch.minimum(radius, distance))
    return radius.clamp(min=0)
