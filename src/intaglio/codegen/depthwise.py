"""Depthwise convolutions: four rows of one channel side by side, so that a dot product of four bytes has four taps.

A tile is a few output rows by a few output pixels by the channels of one vector. A column of input is loaded row by
row and interleaved into quads, four rows of a channel in a dword; every tap column and every output row that reaches
it takes one dot product of it, with zero weights for rows it does not look at. Interleaving leaves channels in an order
that the two packing steps of the epilogue undo.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from intaglio.codegen.context import Context
from intaglio.codegen.writer import Code

ACCUMULATORS = 6
"""Output pixels of a tile: four registers each, eight are left for quads and what makes them."""
MOST_ROWS = 16
"""Input rows of a tile, at most (native/program.h)."""

DEPTHWISE_FIELDS = (
    *(f"rows{i}" for i in range(MOST_ROWS)),
    "pixel",
    "weights",
    "bias",
    "factor",
    "out",
    "out_pixel",
    "out_line",
    "limits",
    "mask",
    "count",
    "table",
)
"""Fields of ``struct DepthwiseTile`` in native/program.h, 8 bytes each, in order."""


@dataclass(frozen=True)
class DepthwiseSpec:
    """``rows`` by ``columns`` output pixels of ``taps`` (y, x) at ``stride`` (y, x); ``lanes`` of 16 channels a vector.

    result: "u8", or "f32" in the order of channels, each pixel of a whole vector. natural, guard, table: as of a
    `TileSpec`.
    """

    rows: int
    columns: int
    taps: tuple[int, int]
    stride: tuple[int, int]
    lanes: int = 4
    result: str = "u8"
    natural: bool = False
    guard: bool = False
    table: bool = False

    @property
    def name(self) -> str:
        """C symbol."""
        (ky, kx), (sy, sx) = self.taps, self.stride
        stem = f"depthwise_{self.rows}x{self.columns}_taps{ky}x{kx}_stride{sy}x{sx}_{16 * self.lanes}"
        marks = ("f32", self.result == "f32"), ("natural", self.natural), ("guard", self.guard), ("table", self.table)
        return stem + "".join(f"_{mark}" for mark, has in marks if has)

    @property
    def channels(self) -> int:
        return 16 * self.lanes

    @property
    def tile(self) -> tuple[int, int]:
        """Output pixels and channels."""
        return self.rows * self.columns, self.channels

    @property
    def rows_read(self) -> int:
        return (self.rows - 1) * self.stride[0] + self.taps[0]

    @property
    def columns_read(self) -> int:
        return (self.columns - 1) * self.stride[1] + self.taps[1]

    @property
    def quads(self) -> int:
        """Groups of four input rows."""
        return -(-self.rows_read // 4)

    def pairs(self) -> list[tuple[int, int]]:
        """(output row, quad) where the row looks at the quad, in the order weights lie."""
        return [(r, q) for r, q in product(range(self.rows), range(self.quads)) if self._looks(r, q)]

    def _looks(self, row: int, quad: int) -> bool:
        first = row * self.stride[0]
        return first < 4 * quad + 4 and first + self.taps[0] > 4 * quad

    @property
    def cost(self) -> float:
        """Interleaving steps and dot products for one output pixel."""
        products = 4 * len(self.pairs()) * self.taps[1] * self.columns
        return (8 * self.quads * self.columns_read + products) / (self.rows * self.columns)


@cache
def tallest(taps: tuple[int, int], stride: tuple[int, int], dilation_y: int = 1) -> DepthwiseSpec:
    """The tile that costs least, the smallest of equals; output rows share input where taps are neighbours only."""
    most = ACCUMULATORS if dilation_y == 1 else 1
    shapes = [(r, c) for r in range(1, most + 1) for c in range(1, ACCUMULATORS // r + 1)]
    specs = [DepthwiseSpec(r, c, taps, stride) for r, c in shapes]
    fitting = [spec for spec in specs if 4 * spec.quads <= MOST_ROWS]
    return min(fitting, key=lambda spec: (spec.cost, spec.rows * spec.columns))


def refusal(weight: np.ndarray, groups: int, tail: str) -> str | None:
    """Why a convolution does not run here, or ``None``; weight [outputs, inputs per group, taps y, taps x]."""
    outputs, per_group, taps_y, taps_x = weight.shape
    if per_group != 1 or outputs != groups or groups < 8:
        return "channels look at each other"
    if taps_y > MOST_ROWS - 3 or taps_x > 15:
        return "too many taps"
    return None if tail in ("requantize", "activate") else "a tail that is no level of its own accumulator"


def channel_order(lanes: int) -> np.ndarray:
    """Channel of every dword of the four accumulators of a pixel."""
    return np.array([16 * (p // 4) + 4 * j + p % 4 for j in range(4) for p in range(4 * lanes)])


def pack_depthwise(weight: np.ndarray, spec: DepthwiseSpec) -> np.ndarray:
    """s8[channels of a block, 1, taps y, taps x] -> s8[pair][tap x][accumulator][dword][4 rows], zeros past the end."""
    taps_y, taps_x = spec.taps
    full = np.zeros((spec.channels, taps_y, taps_x), np.int8)
    full[: len(weight)] = weight[:, 0]
    ordered = full[channel_order(spec.lanes)]
    packed = np.zeros((len(spec.pairs()), taps_x, spec.channels, 4), np.int8)
    for index, (row, quad) in enumerate(spec.pairs()):
        for place in range(4):
            tap = 4 * quad + place - row * spec.stride[0]
            if 0 <= tap < taps_y:
                packed[index, :, :, place] = ordered[:, tap].T
    return packed.ravel()


def blocks(channels: int, spec: DepthwiseSpec) -> list[tuple[int, DepthwiseSpec]]:
    """(first channel, tile) of every block; a rest of 32 channels or fewer takes half a vector."""
    found = []
    for first in range(0, channels, spec.channels):
        half = channels - first <= spec.channels // 2
        lanes = spec.lanes // 2 if half else spec.lanes
        found.append((first, replace(spec, lanes=lanes)))
    return found


@dataclass(frozen=True)
class Layer:
    """A depthwise convolution as its emitter takes it: weight [channels, 1, taps y, taps x], bias with the zero point
    folded in, factor per channel (or one), where the first output's taps begin."""

    weight: np.ndarray
    bias: np.ndarray
    factor: np.ndarray
    stride: tuple[int, int]
    dilation: tuple[int, int]
    start: tuple[int, int]
    result: str
    natural: bool
    guard: bool


def loop(layer: Layer, context: Context) -> str:
    """The function of native/program.h that runs it."""
    return "depthwise_plain" if context.isa.depthwise is None or layer.dilation[1] != 1 else "depthwise"


def emit_layer(code: Code, layer: Layer, source: str, result: str, limits: str, table: str, context: Context) -> None:
    """Fill what `loop` takes, ``d``, from C expressions of its images."""
    if loop(layer, context) == "depthwise_plain":
        _emit_plain(code, layer, source, result, limits, table, context)
        return
    channels, _, *taps = layer.weight.shape
    best = tallest((taps[0], taps[1]), layer.stride, layer.dilation[0])
    floats = layer.result == "f32"
    spec = replace(best, result=layer.result, natural=layer.natural and not floats, guard=layer.guard)
    found = blocks(channels, spec)
    weights = [pack_depthwise(layer.weight[first : first + tile.channels], tile) for first, tile in found]
    looks_up = context.isa.looks_up if table != "0" else ""
    for name, tile in (("kernels", found[0][1]), ("last_kernels", found[-1][1])):
        for look in (False, True)[: 2 if looks_up else 1]:
            symbols = ", ".join(_sizes(replace(tile, table=look), context))
            code(f"static const DepthwiseKernel {'table_' * look}{name}[] = {{{symbols}}};")
    last = channels - found[-1][0]
    code(f"""
        struct Depthwise d = {{}};
        d.in = {source}, d.out = {result};
        d.stride_y = {layer.stride[0]}, d.stride_x = {layer.stride[1]}, d.dilation_y = {layer.dilation[0]};
        d.top = {-layer.start[0]}, d.left = {-layer.start[1]}, d.taps_y = {taps[0]};
        d.rows = {spec.rows}, d.columns = {spec.columns}, d.blocks = {len(found)}, d.block_bytes = {len(weights[0])};
        d.kernels = kernels, d.last_kernels = last_kernels, d.last_mask = {hex((1 << last) - 1)}ull;
        d.tile.mask = {hex((1 << min(64, channels)) - 1)}ull, d.tile.limits = {limits}, d.table = {table};
    """)
    for name, kind, array in (
        ("weights", "int8_t", np.concatenate(weights)),
        ("bias", "int32_t", _columns(layer.bias.astype(np.int32), found)),
        ("factor", "float", _columns(layer.factor, found)),
    ):
        code(f"d.tile.{name} = {context.constant(array, kind)};")
    if looks_up:
        code(f"if ({looks_up})")
        code("    d.kernels = table_kernels, d.last_kernels = table_last_kernels, d.tile.table = d.table, d.table = 0;")


def _emit_plain(code: Code, layer: Layer, source: str, result: str, limits: str, table: str, context: Context) -> None:
    """The same in loops the compiler vectorises, for other instruction sets and columns apart: weights
    [tap y][tap x][channel]."""
    channels, _, taps_y, taps_x = layer.weight.shape
    code(f"""
        struct DepthwisePlain d = {{}};
        d.in = {source}, d.out = {result};
        d.stride_y = {layer.stride[0]}, d.stride_x = {layer.stride[1]};
        d.dilation_y = {layer.dilation[0]}, d.dilation_x = {layer.dilation[1]};
        d.top = {-layer.start[0]}, d.left = {-layer.start[1]}, d.taps_y = {taps_y}, d.taps_x = {taps_x};
        d.limits = {limits}, d.table = {table};
    """)
    for name, kind, array in (
        ("weights", "int8_t", layer.weight[:, 0].transpose(1, 2, 0)),
        ("bias", "int32_t", layer.bias.astype(np.int32)),
        ("factor", "float", np.broadcast_to(layer.factor, (channels,))),
    ):
        code(f"d.{name} = {context.constant(array, kind)};")


def _sizes(tile: DepthwiseSpec, context: Context) -> list[str]:
    """Kernels by rows, then by columns, from 1 on."""
    sizes = product(range(1, tile.rows + 1), range(1, tile.columns + 1))
    specs = [replace(tile, rows=rows, columns=columns) for rows, columns in sizes]
    context.use(specs)
    return [spec.name for spec in specs]


def _columns(values: np.ndarray, found: list[tuple[int, DepthwiseSpec]]) -> np.ndarray:
    """One value per channel (or one for all) in the order of accumulators, block after block."""
    last, tile = found[-1]
    spread = np.zeros(last + tile.channels, values.dtype)
    spread[:] = values if values.size == 1 else 0
    spread[: values.size] = values
    return np.concatenate([spread[first + channel_order(tile.lanes)] for first, tile in found])


def depthwise_checks() -> str:
    """C++ that fails to compile when ``struct DepthwiseTile`` and the table above disagree."""
    names = {f: f for f in DEPTHWISE_FIELDS[MOST_ROWS:]} | {"rows0": "rows"}
    lines = [
        f'static_assert(offsetof(struct DepthwiseTile, {name}) == {8 * DEPTHWISE_FIELDS.index(f)}, "DepthwiseTile");'
        for f, name in names.items()
    ]
    return "\n".join(lines) + "\n"
