"""Classifiers of torchvision, with random weights."""

from __future__ import annotations

from functools import partial

import torchvision

from zoo_models.entry import Entry, image_entry

SIZES = {"inception_v3": 160, "alexnet": 128, "vgg16_bn": 64, "vit_b_16": 224, "swin_t": 128, "swin_v2_t": 128}
"""Height and width of images, where it is not 96."""
NAMES = (
    "alexnet",
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "googlenet",
    "inception_v3",
    "mnasnet1_0",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "regnet_y_400mf",
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "shufflenet_v2_x1_0",
    "squeezenet1_1",
    "swin_t",
    "swin_v2_t",
    "vgg16_bn",
    "vit_b_16",
    "wide_resnet50_2",
)
MOST_USED = {
    "convnext_tiny",
    "densenet121",
    "efficientnet_b0",
    "efficientnet_v2_s",
    "inception_v3",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mobilenet_v3_small",
    "regnet_y_400mf",
    "resnet18",
    "resnet50",
    "swin_t",
    "vgg16_bn",
    "vit_b_16",
}
FIXED = ("vit_b_16", "swin_t", "swin_v2_t", "maxvit_t")
"""Models that take images of one size only, or whose windows depend on it."""


def classifier(name: str) -> Entry:
    """Return a classifier of torchvision by its name."""
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = getattr(torchvision.models, name)(weights=None, **options)
    return image_entry(model, SIZES.get(name, 96), free=name not in FIXED, most_used=name in MOST_USED)


def maxvit() -> Entry:
    """Return MaxViT, which fixes the size of images, at 224 pixels."""
    return image_entry(torchvision.models.maxvit_t(weights=None), 224)


MODELS = {name: partial(classifier, name) for name in NAMES} | {"maxvit_t": maxvit}
