"""The baseline of every table: a linear classifier on the pixels, whose certificate is exact.

The boundary between the label y and another class j is a hyperplane, `margin / ||w_y - w_j||*` away; no search and
no remainder. A certificate for a network counts where it beats this.
"""

import torch
from jaxtyping import Float, Int
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.utils import skip_init

from specguard.certificates.node import FLOOR, check_magnitude
from specguard.data import Dataset
from specguard.errors import DataError
from specguard.geometry import Norm
from specguard.linalg import UNIT, gamma, round_up, upper_length

_ITERATIONS = 2000


def fit_linear(train: Dataset, classes: int) -> nn.Sequential:
    """Logistic regression on the pixels of `train`, by scikit-learn with its default regularization, as a model.

    The model takes images and gives `classes` logits; its weights are in float32, and are what is certified.
    """
    counts = torch.bincount(train.labels, minlength=classes)
    if classes < 2 or len(counts) > classes or not bool((counts > 0).all()):
        raise DataError(f"a linear classifier of {classes} classes needs training images of each, and of no other")
    images, labels = train.batch(slice(0, len(train)))
    regression = LogisticRegression(max_iter=_ITERATIONS).fit(images.flatten(1).cpu().numpy(), labels.cpu().numpy())
    W, b = torch.from_numpy(regression.coef_), torch.from_numpy(regression.intercept_)
    if classes == 2:  # one hyperplane: the logit of the second class over the first
        W, b = torch.cat([torch.zeros_like(W), W]), torch.cat([torch.zeros_like(b), b])
    layer = skip_init(nn.Linear, W.shape[1], classes)  # which draws no random numbers
    with torch.no_grad():
        layer.weight.copy_(W)
        layer.bias.copy_(b)
    return nn.Sequential(nn.Flatten(), layer).eval().requires_grad_(False)


def lower_linear_radii(
    layer: nn.Linear, images: Float[Tensor, "batch *shape"], labels: Int[Tensor, " batch"], norm: Norm = "l2"
) -> Float[Tensor, " batch"]:
    """The largest radius at which no perturbation changes the class of each image: 0 where it is wrong already.

    `min_j (<w_y - w_j, x> + b_y - b_j) / ||w_y - w_j||*`, with the dual norm: l2 for l2, l1 for linf. A class
    with the same weights never wins, or always has.

    Guarantee: lower bound on the distance of the boundary of the exact function of the stored weights; float64,
    rounding included; exact up to that. The box of pixels is not used.
    Cost: one product with every pair of classes.
    Reference: Hölder, as in the ledger under `linear-distance`.
    """
    if labels.shape != (len(images),) or int(labels.min()) < 0 or int(labels.max()) >= layer.out_features:
        raise DataError(f"every image needs one label from 0 to {layer.out_features - 1}")
    x, W = images.flatten(1).double(), layer.weight.detach().double()
    b = W.new_zeros(len(W)) if layer.bias is None else layer.bias.detach().double()
    if not (x.isfinite().all() and W.isfinite().all() and b.isfinite().all()):
        raise DataError("the images or the weights have entries that are not finite")
    for what, values in (("an image", x), ("the weight", W), ("the bias", b)):
        check_magnitude(f"the largest entry of {what}", float(values.abs().max()))
    radius = x.new_full((len(x),), torch.inf)
    for other in range(len(W)):
        D, c = W[labels] - W[other], b[labels] - b[other]  # one rounding of each entry
        magnitude = round_up((D.abs() * x.abs()).sum(1) + b[labels].abs() + b[other].abs(), len(W.mT) + 8)
        # Differences, products, their sum and the bias: (entries + 4) roundings at most on any path.
        margin = (D * x).sum(1) + c - gamma(len(W.mT) + 8) * magnitude - FLOOR
        rate = upper_length(D) if norm == "l2" else round_up(D.abs().sum(1), D.shape[1] + 8)
        rate = round_up(rate, 8)  # for the difference that D is
        distance = torch.where(rate > 0, margin / rate * (1 - 8 * UNIT), torch.where(margin > 0, torch.inf, 0.0))
        radius = torch.where(labels == other, radius, torch.minimum(radius, distance))
    return radius.clamp(min=0)
