"""Generators of linear layers, products, attention, norms of rows, recurrent layers and embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuzz.builder import Builder, RefusedError
from fuzz.network import BATCH

Generator = Callable[[Builder], str]


def linear(b: Builder) -> str:
    x = b.value((1, 2, 3, 4, 5) if b.chance(0.3) else (2, 3))
    outputs = b.size(1, 40)
    layer = b.part(f"nn.Linear({b.shape(x)[-1]}, {outputs}, {b.chance(0.8)})")
    found = b.emit(f"{layer}({x})")
    return b.emit(f"F.{b.pick('relu', 'gelu', 'silu', 'leaky_relu', 'sigmoid')}({found})") if b.chance(0.4) else found


def experts(b: Builder) -> str:
    """A linear layer for each group of rows, which are sorted by an input or by the place of their largest element."""
    x = b.value((2,), lambda v: v.shape[1] % 4 == 0)  # PyTorch multiplies rows of whole 16 bytes only
    width, count, outputs = b.shape(x)[1], b.rng.randint(2, 5), 4 * b.size(1, 10)
    if b.chance(0.6):
        ids = b.input(shape=(BATCH,), kind="ids", limit=count, free=(0,))
    else:
        router = b.part(f"nn.Linear({width}, {count})")
        ids = b.emit(f"{router}({x}).argmax(1)")
    order = b.emit(f"torch.argsort({ids}, stable=True)")
    ends = b.emit(f"torch.histc({ids}.float(), {count}, 0, {count - 1}).cumsum(0, dtype=torch.int32)")
    matrices = b.part(f"nn.Parameter(torch.randn({count}, {width}, {outputs}))")
    found = b.emit(f"F.grouped_mm({x}[{order}], {matrices}, offs={ends})")
    return b.emit(f"F.{b.pick('relu', 'silu', 'sigmoid')}({found})") if b.chance(0.4) else found


def layer_norm(b: Builder) -> str:
    x = b.value((2, 3, 4, 5))
    shape = b.shape(x)
    axes = shape[-1:] if b.chance(0.85) else shape[-2:]
    return b.emit(f"{b.part(f'nn.LayerNorm({list(axes)}, elementwise_affine={b.chance(0.8)})')}({x})")


def rms_norm(b: Builder) -> str:
    x = b.value((2, 3, 4))
    return b.emit(f"{b.part(f'nn.RMSNorm({b.shape(x)[-1]}, elementwise_affine={b.chance(0.8)})')}({x})")


def matmul(b: Builder) -> str:
    x = b.value((2, 3, 4))
    *outer, _, inner = b.shape(x)
    columns, way = b.size(1, 20), b.rng.random()
    if way < 0.3:
        y = b.emit(f"{x}.transpose(-1, -2)")
    elif way < 0.6:
        y = b.input(shape=(*outer, inner, columns), free=(0,))
    else:
        layer = b.part(f"nn.Linear({inner}, {columns * 1})")
        y = b.emit(f"{layer}({x}).transpose(-1, -2)" if columns == inner else f"{x}.transpose(-1, -2) * 0.5")
    found = b.emit(b.pick("{x} @ {y}", "torch.matmul({x}, {y})").format(x=x, y=y))
    return b.emit(f"{found} / {b.number(0.5, 9)}") if b.chance(0.4) else found


def attention(b: Builder) -> str:
    """Self attention from one projection or three, with heads; attention between inputs."""
    x = b.value((3,), lambda v: v.shape[2] <= 64)
    _, length, width = b.shape(x)
    heads, depth = b.pick(1, 2, 3), b.size(1, 17)
    parts = [b.part(f"nn.Linear({width}, {heads * depth})") for _ in range(3)]
    qkv = [b.emit(f"{part}({x}).view(-1, {length}, {heads}, {depth}).transpose(1, 2)") for part in parts]
    extra = ""
    if b.chance(0.25):
        extra = ", is_causal=True"
    elif b.chance(0.3):
        kind = b.pick("bool", "float")
        mask = b.input(shape=b.pick((BATCH, 1, length, length), (BATCH, heads, length, length)), kind=kind, free=(0,))
        extra = f", attn_mask={mask}"
    if b.chance(0.2):
        extra += f", scale={b.number(0.1, 2)}"
    found = b.emit(f"F.scaled_dot_product_attention({', '.join(qkv)}{extra})")
    joined = b.emit(f"{found}.transpose(1, 2).reshape(-1, {length}, {heads * depth})")
    return b.emit(f"{b.part(f'nn.Linear({heads * depth}, {width})')}({joined})") if b.chance(0.7) else joined


RECURRENT_MODULES = {
    "lstm": ("LSTM", ""),
    "gru": ("GRU", ""),
    "rnn_tanh": ("RNN", ""),
    "rnn_relu": ("RNN", ", nonlinearity='relu'"),
}
"""Class, without "Cell", and further options of a layer, by its record."""


def recurrent(kind: str) -> Generator:
    module, extra = RECURRENT_MODULES[kind]

    def generate(b: Builder) -> str:
        first = b.chance(0.7)
        x = b.value((3,)) if first else b.input(shape=(b.size(1, 5), BATCH, b.size(1, 20)), free=(1,))
        hidden, layers, both = b.size(1, 20), b.pick(1, 1, 2), b.chance(0.3)
        options = f"batch_first={first}, bidirectional={both}"
        sizes = f"{b.shape(x)[-1]}, {hidden}, {layers}"
        layer = b.part(f"nn.{module}({sizes}, bias={b.chance(0.8)}, {options}{extra})")
        state = ""
        if b.chance(0.3):
            shape = (layers * (1 + both), BATCH, hidden)
            states = [b.input(shape=shape, free=(1,)) for _ in range(2 if kind == "lstm" else 1)]
            state = f", {states[0]}" if len(states) == 1 else f", ({', '.join(states)})"
        index = b.pick("[0]", "[0]", "[1][0]" if kind == "lstm" else "[1]")
        return b.emit(f"{layer}({x}{state}){index}")

    return generate


def recurrent_cell(kind: str) -> Generator:
    module, extra = RECURRENT_MODULES[kind]

    def generate(b: Builder) -> str:
        x = b.value((2,))
        hidden = b.size(1, 20)
        layer = b.part(f"nn.{module}Cell({b.shape(x)[-1]}, {hidden}{extra})")
        index = "[0]" if kind == "lstm" else ""
        state = ""
        if b.chance(0.4):
            states = [b.input(shape=(BATCH, hidden), free=(0,)) for _ in range(2 if kind == "lstm" else 1)]
            state = f", {states[0]}" if len(states) == 1 else f", ({', '.join(states)})"
        return b.emit(f"{layer}({x}{state}){index}")

    return generate


def embedding(b: Builder) -> str:
    rows, width = b.size(2, 40), b.size(1, 24)
    ids = b.input(shape=(BATCH, b.size(1, 6)), kind="ids", limit=rows, free=(0,))
    padding = f", padding_idx={b.rng.randrange(rows)}" if b.chance(0.2) else ""
    return b.emit(f"{b.part(f'nn.Embedding({rows}, {width}{padding})')}({ids})")


def embedding_bag(b: Builder) -> str:
    rows, width = b.size(2, 40), b.size(1, 24)
    ids = b.input(shape=(BATCH, b.size(1, 6)), kind="ids", limit=rows, free=(0,))
    mode = b.pick("sum", "mean", "max")
    weights = ""
    if mode == "sum" and b.chance(0.3):
        weights = f", per_sample_weights={b.input(shape=b.shape(ids), free=(0,))}"
    layer = b.part(f"nn.EmbeddingBag({rows}, {width}, mode='{mode}')")
    return b.emit(f"{layer}({ids}{weights})")


def fixed_input(b: Builder, *shape: int) -> str:
    return b.input(shape=shape, free=())


def float_product(name: str) -> Generator:
    """A product that has no integer form, of values or constants."""

    def generate(b: Builder) -> str:
        n, k, m = (b.size(1, 9) for _ in range(3))
        given = (
            (lambda *shape: b.part(f"nn.Parameter(torch.randn({shape}))"))
            if b.chance(0.5)
            else (lambda *shape: fixed_input(b, *shape))
        )
        if name in ("mm", "addmm", "inner", "mv", "addmv"):
            x = b.value((2,))
            rows, k = b.shape(x)
            text = {
                "mm": lambda: f"torch.mm({x}, {given(k, m)})",
                "addmm": lambda: (
                    f"torch.addmm({given(m)}, {x}, {given(k, m)}, beta={b.number(-1, 1)}, alpha={b.number(-1, 1)})"
                ),
                "inner": lambda: f"torch.inner({x}, {given(m, k)})",
                "mv": lambda: f"torch.mv({x}, {given(k)})",
                "addmv": lambda: f"torch.addmv({x}[:, 0], {x}, {given(k)})",
            }[name]()
            return b.emit(text)
        if name in ("bmm", "baddbmm", "addbmm"):
            x = b.value((3,))
            rows, n, k = b.shape(x)
            y = b.emit(f"{x}.transpose(1, 2)") if b.chance(0.5) else b.input(shape=(rows, k, m), free=(0,))
            m = b.shape(y)[2]
            text = {
                "bmm": lambda: f"torch.bmm({x}, {y})",
                "baddbmm": lambda: f"torch.baddbmm({given(1, n, m)}, {x}, {y}, alpha={b.number(-1, 1)})",
                "addbmm": lambda: f"torch.addbmm({given(n, m)}, {x}, {y})",
            }[name]()
            return b.emit(text)
        if name == "dot":
            x = b.emit(f"{b.value((2, 3))}.flatten()")
            return b.emit(f"torch.{b.pick('dot', 'vdot')}({x}, {x} * 0.5)")
        if name == "einsum":
            x = b.value((3, 4))
            letters = "bijk"[: len(b.shape(x))]
            if b.chance(0.5):
                return b.emit(
                    f"torch.einsum('{letters},{letters[-1]}m->{letters[:-1]}m', {x}, {given(b.shape(x)[-1], m)})"
                )
            other = letters[:-2] + "m" + letters[-1]
            return b.emit(f"torch.einsum('{letters},{other}->{letters[:-1]}m', {x}, {x} * 0.5)")
        x = b.value((2, 3))
        return b.emit(f"{b.part(f'nn.Bilinear({b.shape(x)[-1]}, {b.shape(x)[-1]}, {m})')}({x}, {x} + 1)")

    return generate


def vector_product(b: Builder) -> str:
    x = b.value((2, 3, 4))
    return b.emit(f"torch.linalg.vecdot({x}, {x} * 0.5 + 1)")


def distances(b: Builder) -> str:
    """Distances from points that no value is near, where rounding would decide the result."""
    x = b.value((2, 3))
    points = b.part(f"nn.Parameter(torch.randn({b.size(1, 9)}, {b.shape(x)[-1]}) * 4)")
    return b.emit(f"torch.cdist({x}, {points}, p={b.pick('1.0', '2.0')})")


def conv_tbc(b: Builder) -> str:
    x = b.value((3,))
    channels, outputs = b.shape(x)[2], b.size(1, 9)
    weight = b.part(f"nn.Parameter(torch.randn(3, {channels}, {outputs}))")
    return b.emit(f"torch.conv_tbc({x}, {weight}, {b.part(f'nn.Parameter(torch.randn({outputs}))')}, 1)")


def convolution(b: Builder) -> str:
    """The overload that other exporters write."""
    x = b.value((3, 4))
    axes, channels = len(b.shape(x)) - 2, b.shape(x)[1]
    weight = b.part(f"nn.Parameter(torch.randn({b.size(1, 12)}, {channels}, {', '.join('3' * axes)}))")
    ones, zeros = [1] * axes, [0] * axes
    return b.emit(f"torch.convolution({x}, {weight}, None, {ones}, {ones}, {ones}, False, {zeros}, 1)")


def transformer_block(b: Builder) -> str:
    x = b.value((3,), lambda v: v.shape[2] % 2 == 0 and v.shape[2] <= 40)
    width = b.shape(x)[2]
    layer = b.part(
        f"nn.TransformerEncoderLayer({width}, {b.pick(1, 2)}, {b.size(1, 30)}, batch_first=True, "
        f"norm_first={b.chance(0.5)}, activation='{b.pick('relu', 'gelu')}')"
    )
    return b.emit(f"{layer}({x})")


def int_values(b: Builder) -> str:
    """Ids that are computed, for tables of floats."""
    ids = b.input(shape=(BATCH, b.size(1, 6)), kind="ids", limit=7, free=(0,))
    if b.values[ids].dtype is not torch.int64:
        raise RefusedError
    return b.emit(f"{b.part('nn.Embedding(9, 6)')}({ids} + {b.pick(0, 1, 2)})")
