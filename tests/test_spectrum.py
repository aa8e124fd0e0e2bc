"""The singular values of attention weights, head by head."""

import torch

from registry import SMALL
from specguard.nn import ViT
from specguard.spectrum import exact_weight_norms


def test_a_head_made_of_orthogonal_rows_has_the_norm_of_its_scale(generator):
    model = ViT(SMALL, generator)
    layer = model.blocks[1].attention.branch.inner
    size, dim = SMALL.dim // SMALL.heads, SMALL.dim
    with torch.no_grad():
        for block in range(9):
            rows = torch.linalg.qr(torch.randn(dim, size, generator=generator))[0].mT
            layer.qkv.weight[block * size : (block + 1) * size] = (block + 1) * rows
        for head in range(3):
            columns = torch.linalg.qr(torch.randn(dim, size, generator=generator))[0]
            layer.out.weight[:, head * size : (head + 1) * size] = (head + 10) * columns
    norms = exact_weight_norms(model)[1]
    assert norms.layer == "blocks.1.attention.branch.inner"
    found = torch.stack([norms.q, norms.k, norms.v, norms.o])
    torch.testing.assert_close(
        found, torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]).double(), rtol=1e-6, atol=0
    )
