"""Generators of convolutions, pools, resizing, batch norm and pixel shuffles."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.builder import Builder, RefusedError

Generator = Callable[[Builder], str]


def image(b: Builder, axes: int, least: int = 1) -> str:
    """Return an image with this number of axes beside batch and channels."""
    return b.value((axes + 2,), lambda x: min(x.shape[2:]) >= least and x.shape[1] <= 96)


def per_axis(b: Builder, axes: int, low: int, high: int) -> tuple[int, ...]:
    one = b.rng.randint(low, high)
    return tuple(b.rng.randint(low, high) for _ in range(axes)) if b.chance(0.4) else (one,) * axes


def groups_of(b: Builder, channels: int) -> int:
    divisors = [n for n in range(1, channels + 1) if channels % n == 0]
    return b.pick(1, 1, channels, b.rng.choice(divisors))


def followed(b: Builder, found: str, channels: int, axes: int) -> str:
    """Add what often follows a layer: batch norm, an activation."""
    if b.chance(0.25):
        found = b.emit(f"{b.part(f'nn.BatchNorm{axes}d({channels})')}({found})")
    return b.emit(f"F.{b.pick('relu', 'relu', 'relu6', 'silu', 'hardswish')}({found})") if b.chance(0.4) else found


def conv(axes: int) -> Generator:
    def generate(b: Builder) -> str:
        x = image(b, axes)
        channels = b.shape(x)[1]
        groups = groups_of(b, channels)
        outputs = groups * b.size(1, max(1, 40 // groups))
        kernel, dilation, stride = per_axis(b, axes, 1, 4), per_axis(b, axes, 1, 2), per_axis(b, axes, 1, 3)
        padding = b.pick(tuple(k // 2 for k in kernel), per_axis(b, axes, 0, 3), (0,) * axes)
        mode = b.pick("zeros", "zeros", "zeros", "reflect", "replicate", "circular")
        if b.chance(0.15):
            padding, stride = b.pick("'same'", "'valid'"), (1,) * axes
        bias = b.chance(0.8)
        layer = b.part(
            f"nn.Conv{axes}d({channels}, {outputs}, {kernel}, {stride}, {padding}, {dilation}, {groups}, {bias}, "
            f"padding_mode='{mode}')"
        )
        return followed(b, b.emit(f"{layer}({x})"), outputs, axes)

    return generate


def conv_transpose(axes: int) -> Generator:
    def generate(b: Builder) -> str:
        x = image(b, axes)
        channels = b.shape(x)[1]
        groups = groups_of(b, channels)
        outputs = groups * b.size(1, max(1, 24 // groups))
        kernel, dilation, stride = per_axis(b, axes, 1, 4), per_axis(b, axes, 1, 2), per_axis(b, axes, 1, 3)
        padding, extra = per_axis(b, axes, 0, 2), b.pick((0,) * axes, (0,) * axes, per_axis(b, axes, 0, 1))
        layer = b.part(
            f"nn.ConvTranspose{axes}d({channels}, {outputs}, {kernel}, {stride}, {padding}, {extra}, {groups}, "
            f"{b.chance(0.8)}, {dilation})"
        )
        return followed(b, b.emit(f"{layer}({x})"), outputs, axes)

    return generate


def max_pool(axes: int) -> Generator:
    def generate(b: Builder) -> str:
        x, kernel = image(b, axes), per_axis(b, axes, 1, 4)
        padding = tuple(b.rng.randint(0, k // 2) for k in kernel)
        stride = b.pick(kernel, per_axis(b, axes, 1, 3))
        dilation = b.pick((1,) * axes, (1,) * axes, per_axis(b, axes, 1, 2))
        return b.emit(f"F.max_pool{axes}d({x}, {kernel}, {stride}, {padding}, {dilation}, {b.chance(0.3)})")

    return generate


def avg_pool(axes: int) -> Generator:
    def generate(b: Builder) -> str:
        x, kernel = image(b, axes), per_axis(b, axes, 1, 4)
        padding = tuple(b.rng.randint(0, k // 2) for k in kernel)
        divisor = f", {b.rng.randint(1, 7)}" if axes > 1 and b.chance(0.2) else ""
        stride = b.pick(kernel, per_axis(b, axes, 1, 3))
        ceil, counted = b.chance(0.3), b.chance(0.5)
        return b.emit(f"F.avg_pool{axes}d({x}, {kernel}, {stride}, {padding}, {ceil}, {counted}{divisor})")

    return generate


def adaptive_avg_pool(axes: int) -> Generator:
    def generate(b: Builder) -> str:
        x = image(b, axes)
        size = b.pick((1,) * axes, per_axis(b, axes, 1, 4))
        text = str(size if axes > 1 else size[0])
        if axes > 1 and b.chance(0.1):
            text = f"({', '.join(['None', *map(str, size[1:])])})"
        return b.emit(f"F.adaptive_avg_pool{axes}d({x}, {text})")

    return generate


def resize(mode: str, axes: int) -> Generator:
    def generate(b: Builder) -> str:
        x = image(b, axes)
        if b.chance(0.5):
            target = f"size={per_axis(b, axes, 1, 9)}"
        else:
            fractions = () if b.free_sizes else (0.5, 1.7)  # capture refuses them for free sizes
            target = f"scale_factor={tuple(b.pick(1.0, 2.0, 2.0, 3.0, *fractions) for _ in range(axes))}"
            if b.chance(0.2):
                target += f", recompute_scale_factor={b.chance(0.5)}"
        align = f", align_corners={b.chance(0.4)}" if mode != "nearest" else ""
        return b.emit(f"F.interpolate({x}, {target}, mode='{mode}'{align})")

    return generate


def grid_sample(b: Builder) -> str:
    x = image(b, 2)
    grid = b.emit(f"torch.tanh({x}[:, :1].permute(0, 2, 3, 1).expand(-1, -1, -1, 2)) * {b.pick(0.9, 1.5)}")
    mode, padding = b.pick("bilinear", "bilinear", "bilinear", "nearest"), b.pick("zeros", "border", "reflection")
    flags = f"mode='{mode}', padding_mode='{padding}', align_corners={b.chance(0.5)}"
    return b.emit(f"F.grid_sample({x}, {grid}, {flags})")


def batch_norm(b: Builder) -> str:
    x = b.value((2, 3, 4, 5))
    axes = {2: 1, 3: 1, 4: 2, 5: 3}[len(b.shape(x))]
    return b.emit(f"{b.part(f'nn.BatchNorm{axes}d({b.shape(x)[1]}, affine={b.chance(0.8)})')}({x})")


def shuffle(b: Builder) -> str:
    x = b.value((3, 4, 5))
    groups = b.rng.choice([n for n in range(1, b.shape(x)[1] + 1) if b.shape(x)[1] % n == 0])
    if len(b.shape(x)) == 4 and b.chance(0.5):
        _, c, h, w = b.shape(x)
        return b.emit(f"{x}.view(-1, {groups}, {c // groups}, {h}, {w}).transpose(1, 2).reshape(-1, {c}, {h}, {w})")
    return b.emit(f"F.channel_shuffle({x}, {groups})")


def pixel_shuffle(b: Builder) -> str:
    x, factor = image(b, 2), b.pick(1, 2, 3)
    channels = b.shape(x)[1]
    if channels % (factor * factor):
        x = b.emit(f"{b.part(f'nn.Conv2d({channels}, {b.size(1, 5) * factor * factor}, 1)')}({x})")
    return b.emit(f"F.pixel_shuffle({x}, {factor})")


def pixel_unshuffle(b: Builder) -> str:
    x = image(b, 2)
    fits = [r for r in (1, 2, 3) if b.shape(x)[2] % r == b.shape(x)[3] % r == 0]
    return b.emit(f"F.pixel_unshuffle({x}, {max(fits)})")


def squeeze_excite(b: Builder) -> str:
    """A gate per channel in front of a 1x1 convolution."""
    x = image(b, 2)
    channels, inner = b.shape(x)[1], b.size(1, 8)
    pooled = b.emit(f"F.adaptive_avg_pool2d({x}, 1)" if b.chance(0.6) else f"{x}.mean((2, 3), keepdim=True)")
    small = b.emit(f"F.relu({b.part(f'nn.Conv2d({channels}, {inner}, 1)')}({pooled}))")
    gate = b.emit(
        f"{b.pick('torch.sigmoid', 'F.hardsigmoid')}({b.part(f'nn.Conv2d({inner}, {channels}, 1)')}({small}))"
    )
    product = b.emit(f"{x} * {gate}" if b.chance(0.5) else f"{gate} * {x}")
    return b.emit(f"{b.part(f'nn.Conv2d({channels}, {b.size(1, 40)}, 1)')}({product})") if b.chance(0.7) else product


def separable(b: Builder) -> str:
    """A depthwise convolution and a 1x1 convolution, as in MobileNet."""
    x = image(b, 2)
    channels, kernel = b.shape(x)[1], b.pick(3, 5)
    deep = b.part(f"nn.Conv2d({channels}, {channels}, {kernel}, {b.pick(1, 2)}, {kernel // 2}, groups={channels})")
    y = b.emit(f"F.{b.pick('relu6', 'hardswish', 'silu')}({deep}({x}))")
    return b.emit(f"{b.part(f'nn.Conv2d({channels}, {b.size(1, 40)}, 1)')}({y})")


def global_pool_head(b: Builder) -> str:
    x = image(b, 2)
    if min(b.shape(x)[2:]) < 1:
        raise RefusedError
    flat = b.emit(f"torch.flatten(F.adaptive_avg_pool2d({x}, 1), 1)" if b.chance(0.5) else f"{x}.mean((2, 3))")
    return b.emit(f"{b.part(f'nn.Linear({b.shape(x)[1]}, {b.size(1, 20)})')}({flat})")
