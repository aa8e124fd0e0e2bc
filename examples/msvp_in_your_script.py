"""A plain training loop for a model of timm, with Maximum Singular Value Penalization in two lines.

python examples/msvp_in_your_script.py
"""

import timm
import torch
from torch.nn.functional import cross_entropy, interpolate

from specguard.data import digits
from specguard.models import attention_weights
from specguard.penalties import MSVP


def main(epochs: int = 2) -> None:
    torch.manual_seed(0)
    data = digits()
    images, labels = data.train.batch(slice(0, None))
    images = interpolate(images, (32, 32), mode="bilinear")
    model = timm.create_model("test_vit", img_size=32, in_chans=1, depth=2, num_classes=len(data.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    before = largest(model)

    penalty = MSVP(q=0.1, k=0.1, v=0.1)  # one: which weights, and how strongly
    vectors = penalty.start(model, torch.Generator().manual_seed(0))

    for epoch in range(epochs):
        for index in torch.randperm(len(images)).split(64):
            value, vectors = penalty(model, vectors)  # two: a scalar, and the vectors for the next step
            loss = cross_entropy(model(images[index]), labels[index])
            optimizer.zero_grad()
            (loss + value).backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, penalty {value.item():.3f}")

    print(f"largest singular value of q, k and v: {before:.2f} before, {largest(model):.2f} now")


@torch.no_grad()
def largest(model: torch.nn.Module) -> float:
    heads = [weights.per_head(which) for weights in attention_weights(model) for which in "qkv"]
    return max(float(torch.linalg.matrix_norm(stack, 2).max()) for stack in heads)


if __name__ == "__main__":
    main()
