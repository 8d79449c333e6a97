"""Tiny networks in plain PyTorch, each named after what makes it worth a test.

`shape` is one item of the network's input; `example(net)` makes a batch, `randomize(net)` makes folding visible.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


def example(net: nn.Module, batch: int = 2, seed: int = 0) -> Tensor:
    return torch.randn(batch, *net.shape, generator=torch.Generator().manual_seed(seed))


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw all weights, biases and batch norm statistics, so that no fold is the identity; returns model.eval()."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            std = math.sqrt(2 / parameter[0].numel()) if parameter.dim() > 1 else 0.2
            parameter.normal_(0, std, generator=draw)
        for norm in model.modules():
            if isinstance(norm, _BatchNorm):
                norm.running_mean.normal_(0, 0.5, generator=draw)
                norm.running_var.uniform_(0.5, 2, generator=draw)
                if norm.affine:
                    norm.weight.uniform_(0.5, 1.5, generator=draw)
    return model.eval()


def uneven(model: nn.Module) -> nn.Module:
    """Channels whose sizes differ a hundredfold, as trained networks have them."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    with torch.no_grad():
        for module in norms or [module for module in model.modules() if isinstance(module, nn.Conv2d)]:
            sizes = torch.logspace(-2, 0, len(module.weight))
            module.weight.mul_(sizes.reshape(-1, *[1] * (module.weight.dim() - 1)))
            if module.bias is not None:
                module.bias.mul_(sizes)
    return model


class Body(nn.Module):
    """``forward(*args)`` is ``body(self, *args)``: a model in one line of a test."""

    def __init__(self, body: Callable[..., Any], **modules: Any):
        super().__init__()
        self.body = body
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def conv_bn(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class ConvBnRelu(nn.Sequential):
    shape = (3, 12, 12)

    def __init__(self, depth: int = 2, width: int = 8):
        blocks = (nn.Sequential(*conv_bn(width if i else 3, width), nn.ReLU()) for i in range(depth))
        super().__init__(*blocks)


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, projected by a strided 1×1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv1 = conv_bn(inputs, outputs, stride=stride)
        self.conv2 = conv_bn(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, kernel=1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class Residual(nn.Module):
    shape = (3, 12, 12)

    def __init__(self, width: int = 8, classes: int = 5):
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, width), nn.ReLU())
        self.blocks = nn.Sequential(ResidualBlock(width, width), ResidualBlock(width, 2 * width, stride=2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.blocks(self.stem(x))).flatten(1))


class OptionABlock(nn.Module):
    """A residual block whose shortcut has no weights: every second pixel, channels padded with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv1 = conv_bn(inputs, outputs, stride=stride)
        self.conv2 = conv_bn(outputs, outputs)
        self.stride, self.pad = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.conv1(x)))
        if self.stride != 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(y + x)


class OptionA(nn.Module):
    """The CIFAR residual network of He et al. 2016, section 4.2, shortened."""

    shape = (3, 16, 16)

    def __init__(self, width: int = 8, classes: int = 5):
        super().__init__()
        self.stem = conv_bn(3, width)
        self.blocks = nn.Sequential(OptionABlock(width, width), OptionABlock(width, 2 * width, stride=2))
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        return self.fc(F.avg_pool2d(x, x.shape[3]).flatten(1))


class Linears(nn.Sequential):
    shape = (16,)

    def __init__(self, widths: tuple[int, ...] = (16, 32, 10)):
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        super().__init__(*layers[:-1])


class MaxPoolNet(nn.Module):
    shape = (3, 13, 13)

    def __init__(self, width: int = 8, classes: int = 5):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.fc = nn.Linear(width * 4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        return self.fc(F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1))


class SharedConv(nn.Module):
    """One convolution called twice, on values of different ranges."""

    shape = (8, 10, 10)

    def __init__(self, width: int = 8):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.conv(x)))


class SharedConvBn(nn.Module):
    """Convolution and batch norm both called twice: the norm folds into one weight or not at all."""

    shape = (8, 10, 10)

    def __init__(self, width: int = 8):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(F.relu(self.bn(self.conv(x)))))


class BnFirst(nn.Module):
    """Batch norm before the convolution: with zero padding it does not fold forward."""

    shape = (3, 10, 10)

    def __init__(self, width: int = 8):
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(self.bn(x)))


class SamePadding(nn.Module):
    """padding='same' with an odd kernel and with an even one, which pads one more on the right."""

    shape = (3, 11, 11)

    def __init__(self, width: int = 8):
        super().__init__()
        self.odd = nn.Conv2d(3, width, 3, padding="same")
        self.even = nn.Conv2d(width, width, 4, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        return self.even(F.relu(self.odd(x)))


class Grouped(nn.Module):
    """A grouped convolution, a depthwise one and a pointwise one."""

    shape = (8, 10, 10)

    def __init__(self, width: int = 8, groups: int = 2):
        super().__init__()
        self.grouped = nn.Conv2d(width, width, 3, padding=1, groups=groups)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.pointwise = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(F.relu(self.depthwise(F.relu(self.grouped(x)))))


class ConvThenUnsupported(nn.Module):
    """erf has no integer form: an island between two convolutions."""

    shape = (3, 10, 10)

    def __init__(self, width: int = 8):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(torch.erf(self.conv1(x)))


class CrossNet(nn.Module):
    """x ← x0 * (x @ w) + x; x0 is read in every layer and is an output too."""

    shape = (16,)

    def __init__(self, width: int = 16, depth: int = 2):
        super().__init__()
        self.weights = nn.ParameterList(torch.empty(width, width).normal_(0, 0.1) for _ in range(depth))

    def forward(self, x0: Tensor) -> tuple[Tensor, Tensor]:
        x = x0
        for weight in self.weights:
            x = x0 * (x @ weight) + x
        return x, x0


class InplaceMutations(nn.Module):
    """In-place SiLU, and an in-place add that reaches its base through a view."""

    shape = (3, 10, 10)

    def __init__(self, width: int = 8):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.conv1(x)
        a.mul_(torch.sigmoid(a))
        b = self.conv2(a)
        b.view(b.shape[0], -1).add_(1.0)
        return b


class MultiOutput(nn.Module):
    """A dict with a tensor and a tuple in it; one value is returned twice."""

    shape = (3, 10, 10)

    def __init__(self, width: int = 8, classes: int = 5):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        features = F.relu(self.conv(x))
        logits = self.fc(features.mean((2, 3)))
        return {"logits": logits, "pair": (features, logits)}


ALL = (
    ConvBnRelu,
    Residual,
    OptionA,
    Linears,
    MaxPoolNet,
    SharedConv,
    SharedConvBn,
    BnFirst,
    SamePadding,
    Grouped,
    ConvThenUnsupported,
    CrossNet,
    InplaceMutations,
    MultiOutput,
)
