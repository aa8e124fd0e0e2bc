"""The singular values of attention weights, head by head."""

import torch

from registry import SMALL
from specguard.nn import ViT
from specguard.spectrum import exact_weight_spectra


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
    found = {w.kind: w.values for w in exact_weight_spectra(model) if w.layer == "blocks.1.attention.branch.inner"}
    assert list(found) == ["q", "k", "v", "o"]
    for kind, first in (("q", 1), ("k", 4), ("v", 7), ("o", 10)):
        wanted = torch.arange(first, first + 3).double().unsqueeze(1).expand(3, size)
        torch.testing.assert_close(found[kind], wanted, rtol=1e-6, atol=0)
