"""A model whose first layer sees the differences of neighbouring pixels only, with images for it and its stages."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from intaglio import stages
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from support.nets import randomize


def smooth(count: int, seed: int, contrast: float = 0.02) -> Tensor:
    """Bright images whose neighbouring pixels hardly differ."""
    generator = torch.Generator().manual_seed(seed)
    brightness = torch.rand(count, 3, 1, 1, generator=generator) * 2 - 1
    details = torch.randn(count, 3, 5, 5, generator=generator) * contrast
    return brightness + nn.functional.interpolate(details, 16, mode="bilinear")


IMAGES, UNSEEN = smooth(32, 0), smooth(64, 1)


def edges(first: int = 8) -> nn.Module:
    """The first layer sees the differences of neighbouring pixels only, and has few multiply-accumulates."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, first, 3), nn.ReLU(), nn.Conv2d(first, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)]
        model = randomize(nn.Sequential(*layers)).eval()
        with torch.no_grad():
            model[0].weight -= model[0].weight.mean((2, 3), keepdim=True)
            model[0].weight *= 20
            model[0].bias *= 0.01
    return model


def below(decibels: float, **first: float) -> Recipe:
    """Leave layers in float below a ratio; the first one has settings of its own."""
    entries = {"*": {"two_bytes_below": 0.0, "float_below": decibels}}
    return Recipe.of({**entries, "0": first} if first else entries)


LIMITED, NEVER = below(25.0), below(0.0)


def prepared(recipe: Recipe | None = None, model: nn.Module | None = None) -> stages.Prepared:
    return stages.prepare(stages.capture(model or edges(), (IMAGES,)), Quantizer(recipe or LIMITED))


def equalized(recipe: Recipe | None = None, images: Tensor = IMAGES, model: nn.Module | None = None) -> stages.Prepared:
    return stages.equalize(prepared(recipe, model), [images])


def converted(before: stages.Prepared) -> stages.Reference:
    return stages.convert(before, stages.calibrate(before, [IMAGES], progress=False))
