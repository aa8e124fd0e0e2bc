"""The singular values of attention weights, head by head, and of every other linear map."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from helpers.registry import MODELS, SMALL
from specguard.nn import Attention, GatedPositionalAttention, TokenConvolution, ViT
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


def strewn(model: nn.Module) -> nn.Module:
    g = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=g))
    return model


def matrices(model: ViT) -> dict[tuple[str, str], torch.Tensor]:
    """What must be there, by hand: heads of attention, linear maps, the patch embedding."""
    dim, heads = model.config.dim, model.config.heads
    found = {("patches.map", "map"): model.patches.map.weight.reshape(1, dim, -1)}
    for block in (n for n, layer in model.named_modules() if n.split(".")[-1].isdigit() and "kernels" not in n):
        inner, layer = f"{block}.attention.branch.inner", model.get_submodule(f"{block}.attention.branch.inner")
        if isinstance(layer, Attention | GatedPositionalAttention):
            for kind, weight in zip("qkv", layer.qkv.weight.split(dim), strict=True):
                found[inner, kind] = torch.stack(weight.split(dim // heads))
            found[inner, "o"] = torch.stack(layer.out.weight.split(dim // heads, 1))
        else:
            found[f"{inner}.out", "out"] = layer.out.weight[None]
        for kind in ("expand", "contract"):
            name = f"{block}.mlp.branch.inner.{kind}"
            found[name, kind] = model.get_submodule(name).weight[None]
    return found | {("head", "head"): model.head.weight[None]}


@pytest.mark.parametrize("name", MODELS)
def test_every_linear_map_is_there_once_in_order_with_its_own_singular_values(name):
    model = strewn(ViT(MODELS[name]))
    found, expected = exact_weight_spectra(model), matrices(model)
    assert [(w.layer, w.kind) for w in found] == list(expected)
    for spectrum, matrix in zip(found, expected.values(), strict=True):
        values = torch.linalg.svdvals(matrix.detach().double())
        assert spectrum.values.dtype == torch.float64
        assert not spectrum.values.requires_grad
        torch.testing.assert_close(spectrum.values, values, rtol=1e-12, atol=1e-13)
        assert (spectrum.values.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("kernels", [(3,), (5, 3, 7)])
def test_convolutions_that_overlap_are_left_out_and_the_map_behind_them_is_not(kernels):
    model = strewn(ViT(replace(SMALL, kernels=kernels, pool="mean")))
    inner = [n for n, layer in model.named_modules() if isinstance(layer, TokenConvolution)]
    found = [w.layer for w in exact_weight_spectra(model)]
    assert inner
    assert not any("kernels" in name for name in found)
    assert [name for name in found if name.startswith(tuple(inner))] == [f"{name}.out" for name in inner]


def test_a_parametrized_weight_is_the_one_that_it_stands_for():
    model = strewn(ViT(SMALL)).train()
    mlp, attention = model.blocks[0].mlp.branch.inner, model.blocks[1].attention.branch.inner
    orthogonal(model.head)
    spectral_norm(mlp.expand, n_power_iterations=50)
    spectral_norm(attention.qkv)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    found = {(w.layer, w.kind): w.values for w in exact_weight_spectra(model)}
    assert len(found) == len(exact_weight_spectra(ViT(SMALL)))
    torch.testing.assert_close(found["head", "head"], torch.ones(1, 13).double(), rtol=0, atol=1e-5)
    assert found["blocks.0.mlp.branch.inner.expand", "expand"][0, 0].item() == pytest.approx(1, abs=1e-4)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(layer.training for layer in model.modules())
    model.eval()
    for kind, weight in zip("qkv", attention.qkv.weight.detach().double().split(SMALL.dim), strict=True):
        values = torch.linalg.svdvals(torch.stack(weight.split(7)))
        torch.testing.assert_close(found["blocks.1.attention.branch.inner", kind], values)


@pytest.mark.parametrize("options", [{"groups": 2}, {"dilation": 2}, {"padding": 1}], ids=str)
def test_a_convolution_whose_matrix_is_not_its_kernel_is_left_out_or_has_the_norm_of_its_map(options):
    """As many steps as the kernel is long, and still patches overlap, or groups see only their own channels."""
    layer = nn.Conv2d(4, 6, 2, stride=2, bias=False, **options).double()
    J = torch.func.jacrev(layer)(torch.zeros(4, 6, 6).double()).reshape(-1, 144)
    for spectrum in exact_weight_spectra(nn.Sequential(layer)):
        assert spectrum.values[0, 0].item() == pytest.approx(torch.linalg.svdvals(J)[0].item(), rel=1e-9)
