"""Certify a model of timm: what no perturbation of an image can do, how large it may be, and what limits the proof.

python examples/certify_timm.py
"""

import timm
import torch

from specguard import Ball, certify
from specguard.models import convert


def main() -> None:
    torch.manual_seed(0)
    # Your model here: timm.create_model(...), with its weights loaded, in eval mode.
    model = timm.create_model("test_vit", img_size=32, depth=1, num_classes=10).eval()
    network = convert(model)  # the same function of pixels in [0, 1], checked in float64
    images = torch.rand(3, *network.shape)
    labels = network(images).argmax(1)  # yours, if you have them
    certificate = certify(network, images, labels, Ball("l2", 1e-4), methods=("local", "adjoint"))
    for number, radius in enumerate(certificate.radius.tolist()):
        reason, loss = next(iter(certificate.terms[number].items()))
        margin = certificate.margins[number].min()
        print(f"image {number}: no change of up to {radius:.2e} in l2 alters the class {int(labels[number])}")
        print(f"  of the margin {margin:.3f}, most is lost by {reason}: {loss:.1e} at radius 1e-4")


if __name__ == "__main__":
    main()
