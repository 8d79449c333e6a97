"""Print depthwise convolutions: packed weights and the loop over tiles (see kernels/depthwise_spec.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from intaglio.codegen.context import Context
from intaglio.codegen.writer import Code
from intaglio.kernels.depthwise_spec import DepthwiseSpec, channel_order
from intaglio.plan.kernel_records import DepthwiseKernel, DepthwiseLoops
from intaglio.plan.scheduling.convolution_pieces import Piece

CHANNELS = 64
"""Channels of a block, after which an epilogue gets the results (native/layers/depthwise.h)."""
COLUMN_TAPS, COLUMN_STRIDES, MOST_COLUMN_ROWS = (3, 5), (1, 2), 7
"""Numbers of tap columns, strides between output pixels, and the largest number of tap rows with which the library
widens each input column once (native/layers/depthwise_vectors.h)."""


def pack_depthwise(weight: np.ndarray, spec: DepthwiseSpec) -> np.ndarray:
    """Pack the weights of a block of channels for a depthwise kernel.

    Args:
        weight: s8[channels, 1, kernel y, kernel x], with at most `spec.channels` channels.
        spec: Kernel that reads the weights.

    Returns:
        s8[pair of output row and quad of input rows, kernel x, accumulator, 4 input rows], flattened and zero-padded.
    """
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


@dataclass(frozen=True)
class Layer:
    """Operands of a depthwise convolution.

    Attributes:
        piece: Weights `[channels, 1, kernel y, kernel x]` and geometry.
        bias: Bias with the zero-point term folded in.
        factor: Requantization factor per channel, or one for all.
        source: C expression of the input image.
        result: C expression of the output image.
        limits: C expression of the `struct Limits` of the result.
        table: The `struct ResultTable` of the results, or "{}" if there is none.
    """

    piece: Piece
    bias: np.ndarray
    factor: np.ndarray
    source: str
    result: str
    limits: str
    table: str


def emit_layer(code: Code, layer: Layer, kernel: DepthwiseKernel | DepthwiseLoops, context: Context) -> str:
    """Print code that fills the kernel's arguments `d`, and return the name of the function that runs it."""
    context.include("layers/depthwise.h")
    if isinstance(kernel, DepthwiseLoops):
        return _emit_plain(code, layer, kernel, context)
    piece, spec, last_spec = layer.piece, kernel.tile, kernel.last
    channels, joined = piece.shape[0] * kernel.joined, kernel.joined
    specs = [*[spec] * (kernel.blocks - 1), last_spec]
    found = [(index * spec.channels, one) for index, one in enumerate(specs)]
    weight = np.concatenate([piece.read()] * joined)
    weights = [pack_depthwise(weight[first : first + tile.channels], tile) for first, tile in found]
    kernels, last_kernels = (context.depthwise_tiles(tile) for tile in (specs[0], last_spec))
    last, target = channels - found[-1][0], context.plan.target
    assert target is not None
    code(f"""
        struct Depthwise d = {{}};
        d.in = {layer.source}, d.out = {layer.result};
        d.stride_y = {piece.stride[0]}, d.stride_x = {piece.stride[1]}, d.dilation_y = {piece.dilation[0]};
        d.top = {-piece.start[0]}, d.left = {-piece.start[1]};
        d.rows = {spec.rows}, d.columns = {spec.columns}, d.blocks = {len(found)}, d.block_bytes = {len(weights[0])};
        d.rows_inside = d.in.line * {spec.rows_read} > {target.caches.l1} && d.in.image < {target.caches.l2 // 2};
        d.kernels = {kernels}, d.last_kernels = {last_kernels}, d.last_mask = {hex((1 << last) - 1)}ull;
        d.tile.mask = {hex((1 << min(64, channels)) - 1)}ull, d.tile.limits = {layer.limits}, d.table = {layer.table};
    """)
    for name, kind, array in (
        ("weights", "int8_t", np.concatenate(weights)),
        ("bias", "int32_t", _columns(_repeated(layer.bias.astype(np.int32), joined), found)),
        ("factor", "float", _columns(_repeated(layer.factor, joined), found)),
    ):
        code(f"d.tile.{name} = {context.constant(array, kind, name)};")
    if joined > 1:
        code(f"d.stride_x = {joined}, d.out.width /= {joined}, d.out.pixel *= {joined};  // pixels in a vector")
    if kernel.looks_up:
        tables = [context.depthwise_tiles(replace(tile, looks_up=True)) for tile in (specs[0], last_spec)]
        with code.block(f"if ({context.isa.lookup_condition})"):
            code(f"d.kernels = {tables[0]}, d.last_kernels = {tables[1]};")
            code("d.tile.table = d.table.entries, d.table = {};")
    return "depthwise"


def _emit_plain(code: Code, layer: Layer, kernel: DepthwiseLoops, context: Context) -> str:
    """Print a `struct DepthwisePlain`, and return the name of the function that computes it without microkernels.

    The library computes layers for instruction sets without depthwise kernels, and those with dilated columns. Weights
    are packed as [kernel y, kernel x, channel].
    """
    piece = layer.piece
    channels, _, taps_y, taps_x = piece.shape
    code(f"""
        struct DepthwisePlain d = {{}};
        d.in = {layer.source}, d.out = {layer.result};
        d.stride_y = {piece.stride[0]}, d.stride_x = {piece.stride[1]};
        d.dilation_y = {piece.dilation[0]}, d.dilation_x = {piece.dilation[1]};
        d.top = {-piece.start[0]}, d.left = {-piece.start[1]}, d.taps_y = {taps_y}, d.taps_x = {taps_x};
        d.limits = {layer.limits}, d.table = {layer.table};
    """)
    for name, kind, array in (
        ("weights", "int8_t", piece.read()[:, 0].transpose(1, 2, 0)),
        ("bias", "int32_t", layer.bias.astype(np.int32)),
        ("factor", "float", np.broadcast_to(layer.factor, (channels,))),
    ):
        code(f"d.{name} = {context.constant(array, kind, name)};")
    has_columns = taps_y <= MOST_COLUMN_ROWS and taps_x in COLUMN_TAPS and piece.dilation[1] == 1
    if has_columns and piece.stride[1] in COLUMN_STRIDES:
        return f"depthwise_columns<{taps_y}, {taps_x}, {piece.stride[1]}, {int(kernel.clamps_float)}>"
    return "depthwise_plain"


def _repeated(values: np.ndarray, count: int) -> np.ndarray:
    """Return the values of all channels, or one for all, for each of ``count`` pixels in a vector."""
    return np.concatenate([values] * count) if values.size > 1 else values


def _columns(values: np.ndarray, found: list[tuple[int, DepthwiseSpec]]) -> np.ndarray:
    """Return one value per channel, or one for all, in the order of the accumulators of all blocks."""
    last, tile = found[-1]
    spread = np.zeros(last + tile.channels, values.dtype)
    spread[:] = values if values.size == 1 else 0
    spread[: values.size] = values
    return np.concatenate([spread[first + channel_order(tile.lanes)] for first, tile in found])
