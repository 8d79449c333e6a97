"""Generators of elementwise operators and reductions: functions of one value, pairs, comparisons, selections."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuzz.builder import Builder

Generator = Callable[[Builder], str]


def of_one(*templates: str) -> Generator:
    """One of these calls of a value ``{x}``; ``{a}`` and ``{b}`` are numbers, ``{p}`` a positive one."""

    def generate(b: Builder) -> str:
        numbers = {"a": b.number(-2, 2), "b": b.number(-2, 2), "p": b.number(0.05, 3)}
        return b.emit(b.pick(*templates).format(x=b.value(), **numbers))

    return generate


def of_positive(*templates: str) -> Generator:
    """One of these calls of a value that is made positive first, or of one that is not."""

    def generate(b: Builder) -> str:
        x = b.value()
        if b.chance(0.9):
            x = b.emit(f"{x}.abs() + {b.number(0.1, 2)}" if b.chance(0.5) else f"F.softplus({x}) + 0.1")
        return b.emit(b.pick(*templates).format(x=x))

    return generate


def in_place(*templates: str) -> Generator:
    """One of these calls, which write over a value: a new one, or one that is read elsewhere or an input."""

    def generate(b: Builder) -> str:
        x = b.value()
        if b.chance(0.6):
            x = b.emit(b.pick(f"{x}.clone()", f"{x} * 1.5", f"F.relu({x})"))
        return b.emit(b.pick(*templates).format(x=x, a=b.number(-2, 2), p=b.number(0.05, 3)))

    return generate


def second(b: Builder, x: str, constant: float = 0.2) -> str:
    """Return an operand for ``x``: of the same shape, one that broadcasts, a constant, or the value itself."""
    shape, way = b.shape(x), b.rng.random()
    same = [name for name, value in b.values.items() if tuple(value.shape) == shape and value.dtype is torch.float32]
    if way < 0.35 and len(same) > 1:
        return b.rng.choice([name for name in same if name != x])
    if way < 0.4:
        return x
    if way < 0.4 + constant:
        sizes = [size if b.chance(0.6) else 1 for size in (1, *shape[1:])]
        sizes = sizes[b.rng.randint(0, max(len(sizes) - 1, 0)) :] if b.chance(0.3) else sizes
        return b.part(f"nn.Parameter(torch.randn({tuple(sizes)}))")
    if way < 0.8 or len(shape) < 2:
        return b.input(shape=shape) if b.chance(0.5) else b.emit(f"{x} * {b.number(-2, 2)}")
    if len(shape) == 4 and b.chance(0.6):
        pooled = b.emit(f"F.adaptive_avg_pool2d({x}, 1)")
        return b.emit(f"torch.sigmoid({pooled})") if b.chance(0.6) else pooled
    axis = b.rng.randrange(1, len(shape))
    return b.emit(f"{x}.mean({axis}, keepdim=True)" if b.chance(0.7) else f"{x}.narrow({axis}, 0, 1)")


def of_two(*templates: str) -> Generator:
    """One of these calls of two values, in either order."""

    def generate(b: Builder) -> str:
        x = b.value()
        y = second(b, x)
        x, y = (y, x) if b.chance(0.25) else (x, y)
        return b.emit(b.pick(*templates).format(x=x, y=y, a=b.number(-2, 2)))

    return generate


def division(b: Builder) -> str:
    x = b.value()
    y = second(b, x)
    y = b.emit(f"{y}.abs() + {b.number(0.2, 1)}") if b.chance(0.9) else y
    mode = b.pick("", "", "", ", rounding_mode='floor'", ", rounding_mode='trunc'")
    if b.chance(0.15):
        return b.emit(f"torch.div({x}, {b.number(0.3, 3)}{mode})")
    return b.emit(f"torch.div({x}, {y}{mode})")


def residual(b: Builder) -> str:
    """A sum of a value and a convolution or linear layer of it, with an activation."""
    x = b.value((2, 3, 4))
    if len(b.shape(x)) == 4:
        channels, kernel = b.shape(x)[1], b.pick(1, 3)
        layer = b.part(f"nn.Conv2d({channels}, {channels}, {kernel}, padding={kernel // 2})")
    else:
        layer = b.part(f"nn.Linear({b.shape(x)[-1]}, {b.shape(x)[-1]})")
    y = b.emit(f"{layer}({x})")
    pair = (x, y) if b.chance(0.5) else (y, x)
    alpha = f", alpha={b.number(-2, 2)}" if b.chance(0.2) else ""
    total = b.emit(f"torch.add({pair[0]}, {pair[1]}{alpha})")
    return b.emit(f"F.{b.pick('relu', 'relu6', 'silu', 'gelu')}({total})") if b.chance(0.6) else total


def channels(b: Builder) -> str:
    """addcmul with constants or values, as a scale and an offset per channel or of any other shape."""
    x = b.value((2, 3, 4, 5))
    shape = b.shape(x)
    axis = b.pick(1, len(shape) - 1)
    sizes = tuple(shape[axis] if i == axis else 1 for i in range(len(shape)))
    if b.chance(0.2):
        sizes = tuple(1 for _ in shape) if b.chance(0.5) else (1, *shape[1:])
    factor = b.part(f"nn.Parameter(torch.randn({sizes}))")
    value = f", value={b.number(-2, 2)}" if b.chance(0.2) else ""
    if b.chance(0.5):
        offset = b.part(f"nn.Parameter(torch.randn({sizes}))")
        return b.emit(f"torch.addcmul({offset}, {x}, {factor}{value})")
    return b.emit(f"torch.addcmul({second(b, x, 0)}, {x}, {factor}{value})")


def prelu(b: Builder) -> str:
    x = b.value((2, 3, 4, 5))
    return b.emit(f"{b.part(f'nn.PReLU({b.pick(1, b.shape(x)[1])})')}({x})")


def truth(b: Builder, like: str = "") -> str:
    """Return a boolean value, of the shape of ``like`` or one that broadcasts to it."""
    x = like or b.value()
    kind = b.pick("eq", "ne", "lt", "le", "gt", "ge")
    other = b.pick("0", "0.5", "-0.25", x if not like else "0.1")
    if b.chance(0.2) and len(b.shape(x)) > 1:
        x = b.emit(f"{x}.mean({b.rng.randrange(1, len(b.shape(x)))}, keepdim=True)")
    return b.emit(f"torch.{kind}({x}, {other})")


def comparison(kind: str) -> Generator:
    def generate(b: Builder) -> str:
        x = b.value()
        x = b.emit(f"{x}.round()") if b.chance(0.3) else x
        y = second(b, x) if b.chance(0.5) else str(b.pick(0, 0.5, -1, 1, b.number(-1, 1)))
        found = b.emit(f"torch.{kind}({x}, {y})")
        return selected(b, found) if b.chance(0.7) else found

    return generate


def selected(b: Builder, condition: str) -> str:
    """Use a condition: in where, as a factor, or as a mask."""
    shape = b.values[condition].shape
    fits = [name for name, value in b.values.items() if value.dtype is torch.float32 and value.shape == shape]
    if not fits:
        return condition
    x = b.rng.choice(fits)
    return b.emit(
        b.pick("torch.where({c}, {x}, 0.5)", "{x}.masked_fill({c}, -1.0)", "{x} * {c}.float()").format(c=condition, x=x)
    )


def of_truths(*templates: str) -> Generator:
    """One of these calls of two conditions; used by a selection."""

    def generate(b: Builder) -> str:
        p = truth(b)
        x = b.lines[-1]
        q = b.emit(f"{p}.logical_not()") if b.chance(0.1) else b.emit(x.partition(" = ")[2].replace("0", "0.3"))
        found = b.emit(b.pick(*templates).format(p=p, q=q))
        return selected(b, found) if b.chance(0.8) else found

    return generate


def where(b: Builder) -> str:
    x = b.value()
    c, y = truth(b, x), second(b, x)
    numbers = (b.number(-1, 1), b.number(-1, 1))
    forms = (f"{c}, {x}, {y}", f"{c}, {y}, {x}", f"{c}, {x}, {numbers[0]}", f"{c}, {numbers[0]}, {x}")
    return b.emit(f"torch.where({b.pick(*forms)})")


def masked_fill(b: Builder) -> str:
    x = b.value()
    c = b.input(shape=b.shape(x), kind="bool") if b.chance(0.3) else truth(b, x)
    value = b.pick("0.0", "-1.5", "torch.tensor(0.25)", "float('-inf')" if b.chance(0.1) else "2")
    return b.emit(f"{x}.masked_fill({c}, {value})")


def cast(b: Builder) -> str:
    if b.chance(0.5):
        return b.emit(f"{truth(b)}.float()")
    x = b.value()
    kind = b.pick("torch.bfloat16", "torch.float64", "torch.int64", "torch.bool")
    return b.emit(f"{x}.to({kind}).to(torch.float32)")


def reduction(*templates: str) -> Generator:
    """One of these calls along an axis ``{d}`` or the axes ``{ds}``; extrema are not along the batch, which may be
    empty."""

    def generate(b: Builder) -> str:
        x, text = b.value((2, 3, 4)), b.pick(*templates)
        count = len(b.shape(x))
        first = 0 if b.chance(0.1) and "amax" not in text and "amin" not in text and "max(" not in text else 1
        axis = b.rng.randrange(first, count)
        axes = sorted(b.rng.sample(range(first, count), b.rng.randint(1, min(2, count - first))))
        return b.emit(text.format(x=x, d=axis - count if b.chance(0.4) else axis, ds=axes, k=b.pick(True, False)))

    return generate


ONE = {
    "sigmoid": ("torch.sigmoid({x})",),
    "hardsigmoid": ("F.hardsigmoid({x})",),
    "hardswish": ("F.hardswish({x})", "{x} * F.hardsigmoid({x})", "{x} * F.relu6({x} + 3) / 6"),
    "silu": ("F.silu({x})", "{x} * torch.sigmoid({x})"),
    "mish": ("F.mish({x})", "{x} * torch.tanh(F.softplus({x}))"),
    "tanh": ("torch.tanh({x})",),
    "gelu": ("F.gelu({x})", "F.gelu({x}, approximate='tanh')", "{x} * 0.5 * (1 + torch.erf({x} / 1.4142135623730951))"),
    "elu": ("F.elu({x})", "F.elu({x}, {p})", "F.elu({x}, {a})"),
    "selu": ("F.selu({x})",),
    "leaky_relu": ("F.leaky_relu({x})", "F.leaky_relu({x}, {p})", "F.leaky_relu({x}, {a})"),
    "abs": ("torch.abs({x})",),
    "neg": ("-{x}",),
    "square": ("torch.square({x})", "{x} ** 2", "{x} * {x}"),
    "celu": ("F.celu({x}, {p})", "F.celu({x}, {a})"),
    "softplus": ("F.softplus({x})", "F.softplus({x}, {p}, {p})", "F.softplus({x}, {a}, 3)"),
    "log_sigmoid": ("F.logsigmoid({x})",),
    "threshold": ("F.threshold({x}, {a}, {b})",),
    "expm1": ("torch.expm1({x})", "torch.expm1({x} * 0.01)"),
    "exp": ("torch.exp({x})", "torch.exp(-{x})", "torch.exp({x}.clamp(max=2))"),
    "sin": ("torch.sin({x})", "torch.sin({x} * 100)"),
    "cos": ("torch.cos({x})", "torch.cos({x} + 30)"),
    "round": ("torch.round({x})",),
    "floor": ("torch.floor({x})",),
    "ceil": ("torch.ceil({x} * {a})",),
    "sign": ("torch.sign({x})",),
    "round_decimals": ("torch.round({x}, decimals=1)", "torch.round({x}, decimals=0)"),
    "add_number": ("{x} + {a}", "{a} + {x}", "torch.add({x}, {a}, alpha=2)"),
    "sub_number": ("{x} - {a}", "torch.sub({x}, {a}, alpha=0.5)"),
    "rsub_number": ("{a} - {x}", "torch.rsub({x}, {a}, alpha=1.5)"),
    "mul_number": ("{x} * {a}", "{a} * {x}", "{x} * 0"),
    "div_number": ("{x} / {a}", "{x} / {p}"),
    "pow_number": (
        "{x} ** 3",
        "{x} ** 2",
        "{x} ** 4",
        "({x}.abs() + 0.1) ** 0.5",
        "({x}.abs() + 0.3) ** -1",
        "{x} ** 1",
        "({x}.abs() + 0.1) ** 0.75",
        "({x}.abs() + 0.3) ** -2",
        "{x}.abs() ** (1 / 3)",
        "{x} ** 7",
    ),
    "log1p": ("torch.log1p({x}.abs())", "torch.log1p({x}.abs() * 0.001)"),
    "softshrink": ("F.softshrink({x}, {p})", "F.softshrink({x})"),
    "hardshrink": ("F.hardshrink({x}, {p})", "F.hardshrink({x})"),
    "clamp": (
        *("F.relu({x})", "F.relu6({x})", "F.hardtanh({x}, -{p}, {p})", "{x}.clamp({a}, {b})", "{x}.clamp_min({a})"),
        *("{x}.clamp_max({a})", "{x}.clamp(min={a})", "{x}.clamp(max={a})", "torch.clamp({x}, -{p}, float('inf'))"),
    ),
}
"""Calls by record; a template is drawn for each call."""
POSITIVE = {
    "sqrt": ("torch.sqrt({x})", "{x} ** 0.5"),
    "reciprocal": ("torch.reciprocal({x})", "1 / {x}"),
    "log": ("torch.log({x})",),
    "rsqrt": ("torch.rsqrt({x})", "{x} ** -0.5"),
}
TWO = {
    "add": ("{x} + {y}", "{x} - {y}", "torch.add({x}, {y}, alpha={a})", "torch.sub({x}, {y}, alpha={a})"),
    "mul": ("{x} * {y}",),
    "rsub": ("torch.rsub({x}, {y})", "torch.rsub({x}, {y}, alpha={a})"),
    "maximum": ("torch.maximum({x}, {y})", "torch.max({x}, {y})"),
    "minimum": ("torch.minimum({x}, {y})", "torch.min({x}, {y})"),
}
TRUTHS = {
    **{f"logical_{kind}": (f"torch.logical_{kind}({{p}}, {{q}})",) for kind in ("and", "or", "xor")},
    "logical_not": ("torch.logical_not({p})",),
    "bitwise_and": ("{p} & {q}", "torch.bitwise_and({p}, {q})"),
    "bitwise_or": ("{p} | {q}", "torch.bitwise_or({p}, {q})"),
    "bitwise_xor": ("{p} ^ {q}", "torch.bitwise_xor({p}, {q})"),
    "bitwise_not": ("~{p}",),
}
REDUCTIONS = {
    "sum": ("{x}.sum({d})", "{x}.sum({d}, keepdim={k})", "{x}.sum({ds}, keepdim={k})", "{x}.sum()"),
    "mean": (
        "{x}.mean({d})",
        "{x}.mean({d}, keepdim={k})",
        "{x}.mean({ds}, keepdim={k})",
        "{x}.mean((-1, -2))",
        "{x}.mean()",
    ),
    "max": ("{x}.max()", "torch.max({x})"),
    "min": ("{x}.min()",),
    "vector_norm": (
        "torch.linalg.vector_norm({x}, dim={ds}, keepdim={k})",
        "F.normalize({x}, dim={d})",
        "torch.linalg.vector_norm({x}, 1, {ds})",
        "torch.linalg.vector_norm({x}, torch.inf, {d}, keepdim={k})",
    ),
    "amax": ("torch.amax({x}, {d}, keepdim={k})", "torch.amax({x}, {ds})", "{x}.max({d}, keepdim={k}).values"),
    "amin": ("torch.amin({x}, {d}, keepdim={k})", "torch.amin({x}, {ds})"),
    "variance": (
        "{x}.var({d}, keepdim={k})",
        "{x}.var({d}, unbiased=False)",
        "{x}.std({d}, correction=0, keepdim={k})",
    ),
    "softmax": ("F.softmax({x}, {d})", "F.softmin({x}, {d})"),
    "log_softmax": ("F.log_softmax({x}, {d})",),
}
WRITTEN = (
    *("{x}.relu_()", "{x}.add_({a})", "{x}.mul_({p})", "F.relu6({x}, inplace=True)", "F.leaky_relu_({x})"),
    *("{x}.clamp_(-1, 0.5)", "{x}.sigmoid_()", "F.hardswish({x}, inplace=True)", "{x}[:, :1].mul_(0.5)", "{x}.neg_()"),
    *("{x}.copy_({x} * 0.5)", "{x}[..., 0].zero_()", "{x}.sub_({x} * 0.25)", "{x}.fill_(0.5)"),
)
