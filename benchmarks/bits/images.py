"""Small networks of images, signals and plain vectors, with random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def conv_bn(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class FirstSteps(nn.Module):
    """The network of the README: a residual sum, a mean, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 16), nn.ReLU())
        self.body = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = torch.relu(self.body(x) + x)
        return self.head(x.mean((2, 3)))


class Shortcut(nn.Module):
    """A residual block of ResNet-20 whose shortcut is every second pixel and channels of zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = conv_bn(inputs, outputs, 3, stride), conv_bn(outputs, outputs)
        self.stride, self.more = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x)))
        if self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more, self.more))
        return F.relu(y + x)


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
        self.stem = conv_bn(3, 16)
        self.blocks = nn.Sequential(*[Shortcut(*size) for size in sizes])
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Bottleneck(nn.Module):
    """A stem with a max pool and two bottlenecks, wide enough for large tiles and batch tiling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.first = nn.Sequential(*conv_bn(64, 64, 1), nn.ReLU(), *conv_bn(64, 64), nn.ReLU(), *conv_bn(64, 256, 1))
        self.project = conv_bn(64, 256, 1)
        self.second = nn.Sequential(*conv_bn(256, 64, 1), nn.ReLU(), *conv_bn(64, 64), nn.ReLU(), *conv_bn(64, 256, 1))
        self.head = nn.Linear(256, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(self.first(x) + self.project(x))
        x = F.relu(self.second(x) + x)
        return self.head(x.mean((2, 3)))


class Inverted(nn.Module):
    """MobileNet's block: expand, depthwise, squeeze and excite, project."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, act: type[nn.Module], excite: bool) -> None:
        super().__init__()
        wide = 4 * inputs
        self.expand = nn.Sequential(*conv_bn(inputs, wide, 1), act())
        self.depthwise = nn.Sequential(*conv_bn(wide, wide, kernel, stride, groups=wide), act())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 8, 1), nn.ReLU(), nn.Conv2d(8, wide, 1))
        self.project = conv_bn(wide, outputs, 1)
        self.excite, self.same = excite, stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(self.expand(x))
        if self.excite:
            y = y * F.hardsigmoid(self.squeeze(y))
        y = self.project(y)
        return x + y if self.same else y


class MobileNet(nn.Module):
    def __init__(self, act: type[nn.Module] = nn.ReLU6, excite: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(3, 16, 3, 2), act())
        rows = [(16, 16, 3, 1), (16, 24, 3, 2), (24, 24, 5, 1), (24, 40, 5, 2)]
        self.blocks = nn.Sequential(*[Inverted(*row, act, excite) for row in rows])
        self.head = nn.Sequential(*conv_bn(40, 64, 1), act(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class Convolutions(nn.Module):
    """Strides, dilation, groups, paddings on one side, even kernels, and channels that fill no vector."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(5, 19, 5, stride=2, padding=2)
        self.dilated = nn.Conv2d(19, 24, 3, padding=2, dilation=2)
        self.grouped = nn.Conv2d(24, 36, 3, padding=1, groups=4)
        self.flat = nn.Conv2d(36, 21, (1, 7), padding=(0, 3))
        self.even = nn.Conv2d(21, 33, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.wide(F.pad(x, (1, 0, 2, 1))))
        x = F.relu6(self.dilated(x))
        x = F.leaky_relu(self.grouped(x), 0.1)
        return self.even(F.relu(self.flat(x)))


class Shuffle(nn.Module):
    """Concatenation, splits, a channel shuffle, and pools of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn(3, 16)
        self.left, self.right = conv_bn(8, 8), conv_bn(8, 8, 3, groups=8)
        self.dense = nn.Conv2d(32, 12, 1)
        self.head = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.stem(x)), 2)
        a, b = x.chunk(2, 1)
        y = torch.cat([F.relu(self.left(a)), self.right(b)], 1)
        n, c, h, w = y.shape
        y = y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        y = torch.cat([F.avg_pool2d(x, 3, 1, 1), y], 1)
        return self.head(F.adaptive_max_pool2d(self.dense(y), 1).flatten(1))


class Segmenter(nn.Module):
    """Down and up again: transposed convolutions, both kinds of resize, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = conv_bn(3, 16, 3, 2), conv_bn(16, 24, 3, 2)
        self.up = nn.ConvTranspose2d(24, 16, 2, 2)
        self.smooth = nn.ConvTranspose2d(32, 8, 4, 2, 1)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down(x))
        b = F.relu(self.up(F.relu(self.deep(a))))
        y = F.relu(self.smooth(torch.cat([a, b], 1)))
        y = F.interpolate(y, scale_factor=2, mode="nearest")
        return self.out(F.interpolate(y, scale_factor=0.5, mode="bilinear"))


class Functions(nn.Module):
    """A layer in front of each function of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.functions = (F.silu, F.gelu, torch.sigmoid, torch.tanh, F.hardswish, F.elu, F.softplus, F.mish)
        self.layers = nn.ModuleList(nn.Conv2d(3, 8, 3, padding=1) for _ in self.functions)
        self.prelu, self.out = nn.PReLU(8), nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        total = self.prelu(self.layers[0](x))
        for layer, function in zip(self.layers, self.functions, strict=True):
            total = total + function(layer(x))
        return self.out(total)


class ConvNext(nn.Module):
    """A depthwise kernel of 7, a layer norm over channels, GELU, a scale for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 24, 4, 4), nn.Conv2d(24, 24, 7, padding=3, groups=24)
        self.norm, self.wide, self.narrow = nn.LayerNorm(24), nn.Linear(24, 96), nn.Linear(96, 24)
        self.gain = nn.Parameter(torch.full((24,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gain * self.narrow(F.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


class Islands(nn.Module):
    """Operators without an int8 kernel in the middle, and two results in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.b(torch.special.bessel_j0(self.a(x)))
        return {"map": torch.relu(y), "top": torch.topk(self.c(y.mean((2, 3))), 2).values}


class Chains(nn.Module):
    """Float32 operators between layers; each becomes one loop over memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 48), nn.Linear(48, 40), nn.Linear(40, 6)
        self.norm = nn.LayerNorm(40)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.a(x)
        x = x * torch.sigmoid(1.7 * x) / (1 + x.abs())
        x = self.b(x - x.amax(-1, keepdim=True)) + y.exp().clamp(max=3)
        x = self.norm(x) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        return self.c(x).softmax(-1)


class Signals(nn.Module):
    """Convolutions of one and of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 16, 5, 2, 2), nn.Conv1d(16, 8, 3, padding=1)
        self.volume, self.head = nn.Conv3d(1, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.second(F.relu(self.first(x))))
        n, c, length = y.shape
        z = F.relu(self.volume(y.view(n, 1, c, 4, length // 4)))
        return self.head(z.mean((2, 3, 4)))


class Perceptron(nn.Module):
    def __init__(self, inputs: int = 48, wide: int = 96, outputs: int = 10) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(inputs, wide), nn.Linear(wide, wide), nn.Linear(wide, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.second(F.gelu(self.first(x)))))


class Trainable(nn.Module):
    """Batch norm and dropout, to be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*conv_bn(3, 8), nn.ReLU(), nn.Dropout(0.1), *conv_bn(8, 16, 3, 2), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class EarlyExit(nn.Module):
    """Plain Python decides how much of it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
        self.near, self.far = nn.Linear(16, 10), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.mean().item() > 1:
            return self.near(x.mean((2, 3)))
        return self.far(self.second(x).mean((2, 3)))


class QuantizedElsewhere(nn.Module):
    """A model as another tool converts it, with quantize and dequantize written out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("levels", torch.randint(-127, 128, (8, 3, 3, 3)).to(torch.int8))
        self.register_buffer("scales", torch.full((8,), 0.002))
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        ops = torch.ops.quantized_decomposed
        weight = ops.dequantize_per_channel(self.levels, self.scales, self.zeros, 0, -127, 127, torch.int8)
        x = ops.quantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8)
        x = ops.dequantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8)
        y = torch.relu(F.conv2d(x, weight))
        y = ops.quantize_per_tensor(y, 0.004, 0, 0, 255, torch.uint8)
        y = ops.dequantize_per_tensor(y, 0.004, 0, 0, 255, torch.uint8)
        return F.max_pool2d(y, 2)
