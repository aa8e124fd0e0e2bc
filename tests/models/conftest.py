"""The libraries that models come from, and models of theirs with every number drawn anew."""

import importlib

import pytest
import torch


@pytest.fixture(scope="session")
def transformers(timm):
    return importlib.import_module("transformers")  # behind timm's fixture, which makes torchvision importable


@pytest.fixture(scope="session")
def torchvision(timm):
    return importlib.import_module("torchvision")


@pytest.fixture
def randomized(generator):
    """Draw all parameters of a model anew: what starts at zero or one would hide that it was forgotten."""

    def draw(model):
        with torch.no_grad():
            for p in model.parameters():
                width = 0.5 if p.ndim == 1 else p.shape[-1] ** -0.5
                p.copy_(torch.randn(p.shape, generator=generator) * width)
        return model.eval()

    return draw
