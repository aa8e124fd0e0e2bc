"""The baseline: logistic regression on the pixels of the digits, certified exactly, by `margin / |w_y - w_j|`."""

import json
import sys
from pathlib import Path

import torch
from sklearn.linear_model import LogisticRegression
from torch import nn

from specguard.certify import certify
from specguard.data import digits
from specguard.geometry import Ball
from specguard.proportion import Proportion
from specguard.runs import environment


def main(radii: list[float], path: Path) -> None:
    data = digits()
    (x, y), (images, labels) = (split.batch(slice(0, len(split))) for split in (data.train, data.test))
    fitted = LogisticRegression(max_iter=2000).fit(x.flatten(1).numpy(), y.numpy())
    layer = nn.Linear(images[0].numel(), len(data.classes))
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(fitted.coef_))
        layer.bias.copy_(torch.from_numpy(fitted.intercept_))
    model = nn.Sequential(nn.Flatten(), layer).eval()
    rows, n = [], len(labels)
    for radius in radii:
        found = certify(model, images, labels, Ball("l2", radius), ("adjoint",), search=False)
        rows.append({"radius": radius, "certified": Proportion(int(found.certified.sum()), n).record()})
    clean = Proportion(int((found.predicted == labels).sum()), n).record()
    record = {"n": n, "clean": clean, "radii": rows, "environment": environment(torch.device("cpu"))}
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main([float(text) for text in sys.argv[1].split(",")], Path(sys.argv[2]))
