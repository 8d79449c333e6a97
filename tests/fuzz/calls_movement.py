"""Generators of data movement: reshapes, slices, padding, concatenation, permutations."""

from __future__ import annotations

from math import prod

import torch

from fuzz.builder import Builder, RefusedError
from fuzz.network import BATCH


def reshape(b: Builder) -> str:
    x = b.value()
    shape = b.shape(x)
    way = b.rng.randrange(7)
    if way == 0 and len(shape) > 1:
        return b.emit(f"torch.flatten({x}, 1)" if b.chance(0.5) else f"{x}.flatten({b.rng.randrange(len(shape))})")
    if way == 1:
        return b.emit(f"{x}.unsqueeze({b.rng.randint(-1, len(shape))})")
    if way == 2 and shape:
        x = b.emit(f"{x}.unsqueeze({b.rng.randint(1, len(shape))})") if 1 not in shape else x
        axes = [axis for axis, size in enumerate(b.shape(x)) if size == 1 and axis] or [0]
        return b.emit(b.pick(f"{x}.squeeze({axes[0]})", f"{x}.squeeze({tuple(axes)})", f"{x}.squeeze({axes[-1]})"))
    total = prod(shape[1:])
    if way == 3 and len(shape) > 2:
        return b.emit(f"{x}.reshape(-1, {shape[-1]})")
    if way == 4 and len(shape) > 1:
        return b.emit(f"{x}.reshape({x}.shape[0], -1)")
    divisors = [n for n in range(1, total + 1) if total % n == 0]
    first = b.rng.choice(divisors)
    rest = total // first
    inner = b.rng.choice([n for n in range(1, rest + 1) if rest % n == 0])
    name = b.pick("reshape", "reshape", "view")
    return b.emit(
        f"{x}.{name}(-1, {first}, {inner}, {rest // inner})" if b.chance(0.7) else f"{x}.{name}(-1, {first}, {rest})"
    )


def slice_(b: Builder) -> str:
    x = b.value((2, 3, 4, 5))
    shape = b.shape(x)
    axis = b.rng.randrange(0 if b.chance(0.05) else 1, len(shape))
    size = shape[axis]
    start, step = b.rng.randrange(size), b.pick(1, 1, 2, 3)
    stop = b.pick("", start + 1, b.rng.randint(start + 1, size), -1 if size > 1 else "")
    first = b.pick(start, start - size if start else "", "")
    lead = ":, " * axis
    way = b.rng.random()
    if way < 0.15:
        return b.emit(f"{x}[{lead}{start}]")
    if way < 0.3:
        return b.emit(f"{x}.chunk({b.pick(2, 3)}, {axis})[{b.pick(0, 1, -1)}]")
    if way < 0.4:
        return b.emit(f"{x}.narrow({axis}, {start}, {b.rng.randint(1, size - start)})")
    if way < 0.45:
        return b.emit(f"torch.split({x}, {b.rng.randint(1, size)}, {axis})[0]")
    return b.emit(f"{x}[{lead}{first}:{stop}:{step}]")


def pad(b: Builder) -> str:
    x = b.value((2, 3, 4, 5))
    axes = b.rng.randint(1, min(3, len(b.shape(x)) - 1))
    mode = b.pick("constant", "constant", "reflect", "replicate", "circular")
    amounts = [b.rng.randint(0, 3) for _ in range(2 * axes)]
    if b.chance(0.1):
        amounts[0] = -1
    value = f", value={b.pick(0, 0.0, 1.5)}" if mode == "constant" and b.chance(0.3) else ""
    return b.emit(f"F.pad({x}, {tuple(amounts)}, mode='{mode}'{value})")


def cat(b: Builder) -> str:
    x = b.value((2, 3, 4, 5))
    shape, axis = b.shape(x), b.rng.randrange(1, len(b.shape(x)))
    fits = [name for name, value in b.values.items() if _joins(value, shape, axis) and name != x]
    parts = [x, *b.rng.sample(fits, min(len(fits), b.rng.randint(0, 2)))]
    while len(parts) < 2:
        way = b.rng.random()
        if way < 0.2:
            parts.append(x)
        elif way < 0.5:
            parts.append(b.emit(f"F.{b.pick('relu', 'silu', 'hardtanh')}({x})"))
        elif way < 0.7:
            parts.append(b.input(shape=[b.size(1, 20) if i == axis else size for i, size in enumerate(shape)]))
        elif way < 0.75:
            parts.append(b.part(f"nn.Parameter(torch.randn({shape}))"))
        else:
            parts.append(b.emit(f"{x} * {b.number(-3, 3)}"))
    b.rng.shuffle(parts)
    if len({tuple(b.shape(p)) if p in b.values else shape for p in parts}) == 1 and b.chance(0.2):
        return b.emit(f"torch.stack([{', '.join(parts)}], {axis})")
    return b.emit(f"torch.cat([{', '.join(parts)}], {axis if b.chance(0.6) else axis - len(shape)})")


def _joins(value: torch.Tensor, shape: tuple[int, ...], axis: int) -> bool:
    same = value.dim() == len(shape) and value.dtype is torch.float32
    return same and all(a == b for i, (a, b) in enumerate(zip(value.shape, shape, strict=True)) if i != axis)


def permute(b: Builder) -> str:
    x = b.value((2, 3, 4, 5))
    count = len(b.shape(x))
    if count == 2 and b.chance(0.2):
        return b.emit(f"{x}.t()")
    if b.chance(0.5):
        first, other = b.rng.sample(range(0 if b.chance(0.1) or count < 3 else 1, count), 2)
        return b.emit(f"{x}.transpose({first}, {other - count if b.chance(0.3) else other})")
    order = [*range(1, count)]
    b.rng.shuffle(order)
    found = b.emit(f"{x}.permute({(0, *order)})")
    return b.emit(f"{found}.contiguous()") if b.chance(0.3) else found


def expand(b: Builder) -> str:
    x = b.value((2, 3, 4))
    shape = list(b.shape(x))
    if 1 not in shape[1:]:
        axis = b.rng.randint(1, len(shape))
        x = b.emit(f"{x}.unsqueeze({axis})")
        shape = list(b.shape(x))
    axis = shape.index(1, 1)
    sizes = [-1] * len(shape)
    sizes[axis] = b.rng.randint(1, 4)
    if b.chance(0.2):
        return b.emit(f"{x}.repeat({', '.join('1' if n == -1 else str(n) for n in sizes)})")
    return b.emit(f"{x}.expand({', '.join(map(str, sizes))})")


def _places(b: Builder, shape: tuple[int, ...], limit: int) -> str:
    """Ids below a limit, as an input or computed."""
    ids = b.input(shape=shape, kind="ids", limit=limit, free=(0,) if shape[0] == BATCH else ())
    return b.emit(f"{ids} - 0") if b.chance(0.3) else ids


def index(b: Builder) -> str:
    x = b.value((2, 3, 4))
    shape = b.shape(x)
    axis = b.rng.randrange(1, len(shape))
    count = b.size(1, 5)
    ids = _places(b, (count,), shape[axis])
    way = b.rng.randrange(4)
    if way == 0:
        return b.emit(f"{x}.index_select({axis}, {ids})")
    if way == 1 and axis + 1 < len(shape):
        other = _places(b, (b.pick(1, count),), shape[axis + 1])
        return b.emit(f"{x}[{':, ' * axis}{ids}, {other}]")
    if way == 2:
        return b.emit(f"{x}[{':, ' * axis}{ids} - {shape[axis]}]")
    return b.emit(f"{x}[torch.arange({x}.shape[0])[:, None], {ids}]" if axis == 1 else f"{x}[{':, ' * axis}{ids}]")


def gather(b: Builder) -> str:
    x = b.value((2, 3))
    shape = b.shape(x)
    axis = b.rng.randrange(1, len(shape))
    read = tuple(b.size(1, 4) if at == axis else size for at, size in enumerate(shape))
    return b.emit(f"torch.gather({x}, {axis}, {_places(b, read, shape[axis])})")


def scatter(b: Builder) -> str:
    """Elements added to places, or the largest or last of those that meet; also whole slices."""
    x = b.value((2, 3))
    shape = b.shape(x)
    axis, rows = b.rng.randrange(1, len(shape)), b.size(1, 5)
    target = b.emit(f"{x}.narrow({axis}, 0, 1) * {b.number(-1, 1)}")
    ids = _places(b, shape, 1)
    if b.chance(0.3):
        flat = _places(b, (shape[axis],), 1)
        return b.emit(f"{target}.index_add({axis}, {flat}, {x})")
    wide = b.emit(f"torch.cat([{target}] * {rows}, {axis})")
    mode = b.pick("amax", "amin", "sum")
    forms = (f"scatter_add({axis}, {ids}, {x})", f"scatter({axis}, {ids}, {x})")
    return b.emit(f"{wide}.{b.pick(*forms, f'scatter_reduce({axis}, {ids}, {x}, {mode!r})')}")


def cumsum(b: Builder) -> str:
    x = b.value((2, 3, 4))
    axis = b.rng.randrange(1, len(b.shape(x)))
    return b.emit(
        b.pick(f"{x}.cumsum({axis})", f"({x} > 0).cumsum({axis}).float()", f"({x} * 3).long().cumsum({axis})")
    )


def integer_sum(b: Builder) -> str:
    x = b.value((2, 3, 4))
    axes = b.rng.sample(range(1, len(b.shape(x))), 1) if b.chance(0.7) else [-1, 1][: len(b.shape(x)) - 1]
    counted = b.pick(f"({x} > 0)", f"({x} * 3).long()", f"({x} * 3).int()")
    found = b.emit(f"{counted}.sum({axes}, keepdim=True)")
    return b.emit(f"{x} * {found}.float()")


def extremum(b: Builder) -> str:
    x = b.value((2, 3, 4))
    axis = b.rng.randrange(1, len(b.shape(x)))
    return b.emit(f"{x}.{b.pick('argmax', 'argmin')}({axis}, keepdim={b.chance(0.5)})")


def argsort(b: Builder) -> str:
    """Sorted values, or places that select elements: those of a sort whose equal elements keep their order."""
    x = b.value((2, 3, 4))
    shape = b.shape(x)
    axis = b.rng.randrange(1, len(shape))
    keys = b.emit(f"({x} * 3).long()") if b.chance(0.3) else x
    options = f"dim={axis}, descending={b.chance(0.5)}"
    if b.chance(0.4):
        return b.emit(f"torch.sort({keys}, {options}, stable=True).values.float()")
    if b.chance(0.4):
        return b.emit(f"torch.topk({x}, {b.rng.randint(1, shape[axis])}, {axis}, {b.chance(0.5)}).values")
    return b.emit(f"torch.gather({x}, {axis}, torch.argsort({keys}, {options}, stable=True))")


def integers(b: Builder) -> str:
    """Arithmetic on integers of 64 or 32 bits, which selects or shifts values."""
    x = b.value()
    whole = b.emit(f"({x} * {b.number(1, 9)}).{b.pick('long', 'round().long', 'sign().long')}()")
    narrow = b.emit(f"({whole} > 0).int() * {b.emit(f'({whole} < 3).int()')}") if b.chance(0.3) else whole
    forms = ("{i} * 3 - 2", "{i}.abs().clamp(1, 5)", "-{i} + {j}", "torch.where({i} > {j}, {i}, {j})", "{i} << 2")
    found = b.emit(b.pick(*forms, "{i}.sign() * 4", "torch.maximum({i}, {j})", "{i} >> 1").format(i=whole, j=narrow))
    if b.chance(0.2):
        found = b.emit(f"{found} // {b.pick(2, 3, -5)}")
    return b.emit(f"{x} + {found}" if b.chance(0.5) else f"{found}.float()")


def other_movement(b: Builder) -> str:
    """Movement that decomposes or has no record."""
    x = b.value((2, 3, 4))
    axis = b.rng.randrange(1, len(b.shape(x)))
    if b.shape(x)[axis] < 1:
        raise RefusedError
    return b.emit(
        b.pick(
            *(f"{x}.flip({axis})", f"torch.roll({x}, {b.rng.randint(0, 3)}, {axis})", f"{x}.unbind({axis})[0]"),
            *(
                f"{x}.repeat_interleave(2, {axis})",
                f"{x}.index_select({axis}, torch.tensor([0]))",
                f"{x}.cumsum({axis})",
            ),
            *(f"{x}.movedim(1, -1)", f"torch.sin({x})", f"{x}.tril()", f"F.glu(torch.cat([{x}, {x}], {axis}), {axis})"),
            *(
                f"torch.sort({x}, {axis}).values",
                f"{x}.detach()",
                f"F.dropout({x}, 0.5, False)",
                f"{x}.unfold({axis}, 1, 1)",
            ),
        )
    )
