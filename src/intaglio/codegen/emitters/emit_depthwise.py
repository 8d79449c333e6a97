"""Depthwise convolutions: their weights packed, and the loop over their tiles (kernels/depthwise_spec.py)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from intaglio.codegen.context import Context
from intaglio.codegen.writer import Code
from intaglio.kernels.depthwise_spec import MOST_ROWS, DepthwiseSpec, channel_order, tallest
from intaglio.ops.opdef import Tail


def refusal(weight: np.ndarray, groups: int, tail: Tail | None) -> str | None:
    """Why a convolution does not run here, or ``None``; weight [outputs, inputs per group, taps y, taps x]."""
    outputs, per_group, taps_y, taps_x = weight.shape
    if per_group != 1 or outputs != groups or groups < 8:
        return "channels look at each other"
    if taps_y > MOST_ROWS - 3 or taps_x > 15:
        return "too many taps"
    return None if tail in (Tail.REQUANTIZE, Tail.ACTIVATE) else "a tail that is no level of its own accumulator"


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


def loop_name(layer: Layer, context: Context) -> str:
    """Return the function of native/products/depthwise.h that runs a layer."""
    return "depthwise_plain" if context.isa.depthwise is None or layer.dilation[1] != 1 else "depthwise"


def emit_layer(code: Code, layer: Layer, source: str, result: str, limits: str, table: str, context: Context) -> None:
    """Fill what the loop takes, ``d``, from C expressions of its images."""
    context.include("products/depthwise.h")
    if loop_name(layer, context) == "depthwise_plain":
        _emit_plain(code, layer, source, result, limits, table, context)
        return
    channels, _, *taps = layer.weight.shape
    best = tallest((taps[0], taps[1]), layer.stride, layer.dilation[0])
    floats = layer.result == "f32"
    spec = replace(best, result=layer.result, natural=layer.natural and not floats, guard=layer.guard)
    found = blocks(channels, spec)
    weights = [pack_depthwise(layer.weight[first : first + tile.channels], tile) for first, tile in found]
    looks_up = context.isa.looks_up if table != "0" else ""
    kernels, last_kernels = (context.depthwise_tiles(tile) for _, tile in (found[0], found[-1]))
    last = channels - found[-1][0]
    code(f"""
        struct Depthwise d = {{}};
        d.in = {source}, d.out = {result};
        d.stride_y = {layer.stride[0]}, d.stride_x = {layer.stride[1]}, d.dilation_y = {layer.dilation[0]};
        d.top = {-layer.start[0]}, d.left = {-layer.start[1]}, d.taps_y = {taps[0]};
        d.rows = {spec.rows}, d.columns = {spec.columns}, d.blocks = {len(found)}, d.block_bytes = {len(weights[0])};
        d.kernels = {kernels}, d.last_kernels = {last_kernels}, d.last_mask = {hex((1 << last) - 1)}ull;
        d.tile.mask = {hex((1 << min(64, channels)) - 1)}ull, d.tile.limits = {limits}, d.table = {table};
    """)
    for name, kind, array in (
        ("weights", "int8_t", np.concatenate(weights)),
        ("bias", "int32_t", _columns(layer.bias.astype(np.int32), found)),
        ("factor", "float", _columns(layer.factor, found)),
    ):
        code(f"d.tile.{name} = {context.constant(array, kind, name)};")
    if looks_up:
        tables = [context.depthwise_tiles(replace(tile, table=True)) for _, tile in (found[0], found[-1])]
        with code.block(f"if ({looks_up})"):
            code(f"d.kernels = {tables[0]}, d.last_kernels = {tables[1]};")
            code("d.tile.table = d.table, d.table = 0;")


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
        code(f"d.{name} = {context.constant(array, kind, name)};")


def _columns(values: np.ndarray, found: list[tuple[int, DepthwiseSpec]]) -> np.ndarray:
    """One value per channel (or one for all) in the order of accumulators, block after block."""
    last, tile = found[-1]
    spread = np.zeros(last + tile.channels, values.dtype)
    spread[:] = values if values.size == 1 else 0
    spread[: values.size] = values
    return np.concatenate([spread[first + channel_order(tile.lanes)] for first, tile in found])
