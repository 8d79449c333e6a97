"""A convolution as kernels see it: numbers drawn from a seed, packed by `codegen.weight_packing`, run by `harness`."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from hypothesis import strategies as st

from intaglio import numerics
from intaglio.codegen.context import limits
from intaglio.codegen.int4_packing import pack_int4, panel_line_bytes
from intaglio.codegen.weight_packing import PanelPacking, pack_columns, pack_weights, packing
from intaglio.codegen.winograd_packing import transform_weights
from intaglio.ir import DType, Op, QParams, TensorType
from intaglio.kernels import ISAS, TileSpec
from intaglio.kernels.tile_spec import INT4_CHANNELS, INT4_GROUP, PACKED_RESULTS, RESULTS
from intaglio.ops import OPS
from support.matmul_library import HAS_VBMI, SLACK, Image, Memory, kernels

CANARY = 0xA5
MARGIN = 256
LINE_PIXELS = 16
"""Pixels of a line that is part of a tile, at most, as in native/layers/matmul.h."""


@dataclass(frozen=True)
class Case:
    """A convolution, how it is computed, and a seed for its numbers.

    ``table``: looked up in a ``kernel``, or ``after`` it. ``remainder``: results of 16 bits, whose ``bounds`` and zero
    point are those of the 8-bit values; ``residual_remainder``: so has the residual operand. ``saturates``: use the
    kernels that saturate instead of clamping if the numbers permit. ``halos``: of input, result, residual operand,
    beyond what padding needs. ``behind``: bytes of canaries after the result; after those a page that cannot be
    touched. ``exponent``: factors are about 2^exponent; ``None`` spreads the quantized values. ``extreme``: activations
    0 or 255, weights +-127, biases up to 2^30. ``int4``: weights have 4 bits and a multiple for each group; extreme
    ones are -8 or 7 times 15. ``row_taps``: taps of a row that the kernels compute together. ``widened``: there are
    kernels for widened input; ``transformed``: there are weights for Winograd's method; ``only``: there are no others.
    ``levels``: of the cache that weights are prefetched into, 0 for those of this processor.
    """

    images: int = 1
    height: int = 1
    width: int = 1
    per_group: int = 4
    per_group_out: int = 16
    groups: int = 1
    taps: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    halos: tuple[int, int, int] = (0, 0, 0)
    zero_points: tuple[int, int, int] = (0, 0, 0)
    bounds: tuple[int, int] = (0, 255)
    exponent: int | None = None
    extreme: bool = False
    int4: bool = False
    row_taps: int = 1
    widened: bool = False
    transformed: bool = False
    only: bool = False
    result: str = "u8"
    blocks: int = 1
    rows: int = 1
    lines: int = 0
    keeps_setup: bool = True
    saturates: bool = True
    table: str = "none"
    remainder: bool = False
    residual_remainder: bool = False
    guard: bool = False
    threads: int = 1
    split_channels_below: int = 0
    chunk_bytes: int = 1 << 20
    behind: int = MARGIN
    levels: int = 0
    seed: int = 0


@dataclass(frozen=True)
class CaseData:
    """Operands in logical order, whether products may leave int32, and what the kernels must give."""

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    factor: np.ndarray
    residual: np.ndarray | None
    residual_factor: np.ndarray | None
    needs_guard: bool
    expected: np.ndarray
    remainder: np.ndarray | None = None
    residual_remainder: np.ndarray | None = None
    row_scales: np.ndarray | None = None
    row_bias: np.ndarray | None = None


def case_data(case: Case) -> CaseData:
    """Draw the operands and let the operators' references say what the result is."""
    draw = np.random.default_rng(case.seed)
    outputs = case.groups * case.per_group_out
    x = draw.integers(0, 256, (case.images, case.groups * case.per_group, case.height, case.width)).astype(np.uint8)
    weight = draw.integers(-127, 128, (outputs, case.per_group, *case.taps)).astype(np.int8)
    bias = draw.integers(-4000, 4001, outputs).astype(np.int32)
    if case.extreme:
        x, weight = np.where(x < 250, 255, 0).astype(np.uint8), np.where(weight < 0, -127, 127).astype(np.int8)
        weight[::2] = np.abs(weight[::2])
        bias = draw.integers(-(2**30), 2**30, outputs).astype(np.int32)
    if case.int4:
        weight = _int4_weight(draw, weight, case.extreme)
    zero_x, zero_y, zero_other = case.zero_points
    attrs = {"stride": case.stride, "padding": case.padding, "dilation": case.dilation, "groups": case.groups}
    acc = OPS["conv2d"].reference(Op("conv2d", (), ("acc",), attrs), [x, weight, bias], [_levels(zero_x)], _acc([1.0]))
    unit = 60 / max(float(acc.std()) if acc.size else 1.0, 1.0) if case.exponent is None else 2.0**case.exponent
    factor = (unit * draw.uniform(0.5, 1.5, outputs)).astype(np.float32)
    reach = numerics.accumulator_bound(weight, bias, 0, 255, zero_x)
    assert reach.max() < 2**31
    if case.result == "f32":
        expected = OPS["dequantize"].reference(Op("dequantize", (), ("y",)), [acc], [_acc(factor)], _levels(0))
        return CaseData(x, weight, bias, factor, None, None, False, expected)
    if case.result == "rows":
        return _with_row_scales(draw, acc, CaseData(x, weight, bias, factor, None, None, False, acc))
    names, bounds = ("y", "remainder")[: 1 + case.remainder], dict(zip(("low", "high"), bounds_of(case), strict=True))
    if case.remainder:
        factor *= np.float32(numerics.QUANT_STEPS)
    if case.result == "u8":
        tail = Op("requantize", (), names, bounds)
        expected = OPS["requantize"].reference(tail, [acc, factor], [_acc(factor)], _levels(zero_y))
        if case.table != "none":
            expected = table_of(case)[expected]  # which is within bounds
        expected, rest = expected if case.remainder else (expected, None)
        return CaseData(x, weight, bias, factor, None, None, bool((reach * factor).max() >= 2**29), expected, rest)
    other = draw.integers(0, 256, acc.shape).astype(np.uint8)
    factor, other_sign = factor * np.float32(draw.choice([-1, 1])), draw.choice([-1, 1])
    spread = draw.uniform(0.5, 1.5, outputs if case.seed % 2 else 1)
    unit = (numerics.QUANT_STEPS if case.remainder else 1) / (numerics.QUANT_STEPS if case.residual_remainder else 1)
    residual_factor = (other_sign * 2.0 ** (case.exponent or 0) * unit * spread).astype(np.float32)
    types = [_acc(abs(factor)), _levels(zero_other), _levels(0), _levels(0), _levels(numerics.QUANT_STEPS // 2)]
    operands, most, residual_remainder = [acc, other, factor, residual_factor], 255, None
    if case.residual_remainder:
        residual_remainder, most = draw.integers(0, numerics.QUANT_STEPS, acc.shape).astype(np.uint8), 2**16
        operands.append(residual_remainder)
    found = OPS["add"].reference(Op("add", (), names, bounds), operands, types, _levels(zero_y))
    expected, rest = found if case.remainder else (found, None)
    needs_guard = bool((reach * abs(factor) + most * abs(residual_factor)).max() >= 2**29)
    return CaseData(x, weight, bias, factor, other, residual_factor, needs_guard, expected, rest, residual_remainder)


def _with_row_scales(draw: np.random.Generator, acc: np.ndarray, given: CaseData) -> CaseData:
    """Return the operands with a scale for each pixel, one of them NaN, and a bias in float."""
    by_pixel = acc.transpose(0, 2, 3, 1)
    scales = draw.uniform(0.5, 1.5, (*by_pixel.shape[:-1], 1)).astype(np.float32)
    scales.reshape(-1)[:1] = np.nan
    bias = draw.normal(size=by_pixel.shape[-1]).astype(np.float32)
    expected = numerics.dequantize_rows(by_pixel, scales, given.factor, bias).transpose(0, 3, 1, 2)
    return replace(given, expected=np.ascontiguousarray(expected), row_scales=scales, row_bias=bias)


def _int4_weight(draw: np.random.Generator, weight: np.ndarray, extreme: bool) -> np.ndarray:
    """Return a weight of 4 bits with the signs of ``weight``, with a multiple for each group."""
    outputs, inputs, *_ = weight.shape
    values, multiples = draw.integers(0, 8, weight.shape), draw.integers(1, 16, (outputs, inputs // INT4_GROUP))
    if extreme:
        values[:], multiples[:] = 7, 15
    values = np.where(weight < 0, -1 - values, values)
    return (values * np.repeat(multiples, INT4_GROUP, 1)[..., None, None]).astype(np.int8)


def bounds_of(case: Case) -> tuple[int, int]:
    """Return the bounds of the results: of the quantized values, or of results of 16 bits.

    Bounds of 16 bits are drawn from the steps between two quantized values. The lowest is in the middle of the steps of
    a zero point of 0, which kernels that saturate need.
    """
    if not case.remainder:
        return case.bounds
    low, high = case.bounds
    bottom = 127 if (case.zero_points[1], low) == (0, 0) else case.seed % numerics.QUANT_STEPS
    return numerics.QUANT_STEPS * low + bottom, numerics.QUANT_STEPS * high + (
        254 if low == high else case.seed // 7 % 255
    )


def table_of(case: Case) -> np.ndarray:
    """256 quantized values in no order."""
    return np.random.default_rng(case.seed + 1).integers(0, 256, 256).astype(np.uint8)


def _levels(zero_point: int) -> TensorType:
    return TensorType((), DType.U8, QParams((1.0,), (zero_point,), 0, 255))


def _acc(scales) -> TensorType:
    scales = tuple(float(scale) for scale in scales)
    return TensorType((), DType.I32, QParams(scales, (0,) * len(scales), -(2**31), 2**31 - 1, 1))


@cache
def memory(role: str) -> Memory:
    return Memory(1 << 26)


@dataclass(frozen=True)
class Result:
    """Results of the kernels.

    Attributes:
        values: Result in NCHW.
        halo: Quantized values of the halo of the result.
        stray: Whether memory outside of the result changed.
        remainder: Lower bytes of results of 16 bits, in NCHW.
    """

    values: np.ndarray
    halo: np.ndarray
    stray: bool
    remainder: np.ndarray | None


def run(isa: str, case: Case, given: CaseData) -> Result:
    """The convolution, then the halo of its result, on memory full of canaries."""
    inputs, outputs = given.x.shape[1], len(given.weight)
    packs = ISAS[isa].packs and case.result in PACKED_RESULTS
    plan = packing(outputs, inputs, case.groups, case.taps[1], case.dilation[1], case.blocks, packs)
    n, c, h, w = given.expected.shape
    item, halo = given.expected.itemsize, case.halos[1]
    shape = (n, h + 2 * halo, w + 2 * halo, c * item)
    arena = memory("out").end(MARGIN + int(np.prod(shape)) + case.behind)
    arena[:] = CANARY
    framed = arena[MARGIN : arena.size - case.behind].reshape(shape)
    inside = (slice(None), slice(halo, halo + h), slice(halo, halo + w))
    images = {"out": Image(framed.ctypes.data, n, h, w, c * item, halo)}
    images["in"] = _stored("in", given.x, case.halos[0] + max(case.padding), case.zero_points[0])
    if given.residual is not None:
        images["residual"] = _stored("residual", given.residual, case.halos[2], case.zero_points[2])
    beside = [memory("remainder").end(MARGIN + given.remainder.size + case.behind)] if case.remainder else []
    for memory_of_remainder in beside:
        memory_of_remainder[:] = CANARY
        images["remainder"] = Image(memory_of_remainder.ctypes.data + MARGIN, n, h, w, c)
    if given.residual_remainder is not None:
        images["residual_remainder"] = _stored("other rest", given.residual_remainder, 0, 0)
    guard = case.result in PACKED_RESULTS and (case.guard or given.needs_guard)
    heights = range(1, case.rows + 1)
    zeros = case.zero_points[1 : 3 if case.result == "add" and not case.residual_remainder else 2]
    plain = bounds_of(case)[0] == 127 if case.remainder else case.bounds == (0, 255)
    saturates = packs and case.saturates and plain and not any(zeros)
    marks = (
        saturates,
        guard,
        case.table == "kernel",
        case.remainder,
        case.residual_remainder,
        case.int4,
        case.row_taps,
    )
    full, last = (
        [TileSpec(rows, blocks, case.result, *marks) for rows in heights] for blocks in (plan.blocks, plan.last_blocks)
    )
    first_panels = full if plan.panels > 1 else last
    assert LINE_PIXELS * case.lines <= case.rows, "a tile of so many lines has no kernel"
    library = kernels(isa)
    tables = {"kernels": library.heights(first_panels), "last_kernels": library.heights(last)}
    if case.widened:
        for name, specs in (("widened_kernels", first_panels), ("widened_last_kernels", last)):
            tables[name] = library.heights([replace(spec, widened=True) for spec in specs])
    if case.transformed:
        for name, specs in (("sums_kernels", first_panels), ("sums_last_kernels", last)):
            tables[name] = library.heights([replace(spec, sums=True) for spec in specs])
    if case.only:
        del tables["kernels"], tables["last_kernels"]
    first = np.array(plan.first, np.int32)
    fields = _fields(case, given, plan, images["in"]) | _operands(case, given, plan)
    fields |= {name: _address(table) for name, table in tables.items()}
    if case.table != "none":
        table = memory("table").hold(table_of(case)[np.clip(np.arange(256), *case.bounds)])
        fields["tile.table" if case.table == "kernel" else "table.entries"] = table
    fields["first_channel"] = first.ctypes.data if first.any() else 0
    library.matmul(images, fields, case.threads, case.keeps_setup)
    values = framed[inside].copy().view(given.expected.dtype).transpose(0, 3, 1, 2)
    framed[inside] = CANARY
    stray = bool((arena != CANARY).any())
    library.fill_halo(images["out"], case.zero_points[1], case.threads)
    untouched = framed[inside], arena[:MARGIN], arena[arena.size - case.behind :]
    stray |= any(bool((part != CANARY).any()) for part in untouched)
    frame = np.ones(shape[:3], bool)
    frame[inside] = False
    rest = None
    for memory_of_remainder in beside:
        within = slice(MARGIN, memory_of_remainder.size - case.behind)
        rest = memory_of_remainder[within].reshape(n, h, w, c).transpose(0, 3, 1, 2).copy()
        memory_of_remainder[within] = CANARY
        stray |= bool((memory_of_remainder != CANARY).any())
    return Result(values, framed[frame], stray, rest)


def _stored(role: str, array: np.ndarray, halo: int, zero_point: int) -> Image:
    """An NCHW array as an NHWC image, zero points around it, the planner's slack and then a guard page behind it."""
    n, c, h, w = array.shape
    widths = ((0, 0), (halo, halo), (halo, halo), (0, 0))
    padded = np.pad(array.transpose(0, 2, 3, 1), widths, constant_values=zero_point)
    return Image(memory(role).hold(padded, SLACK), n, h, w, c, halo)


def _address(table) -> int:
    return np.frombuffer(table, np.uint8).ctypes.data


def _fields(case: Case, given: CaseData, plan: PanelPacking, image: Image) -> dict[str, int]:
    """Geometry and schedule, as `codegen.emit_matmul` prints them."""
    taps = case.row_taps if plan.joined else case.taps[1]
    flat = case.taps == case.stride == (1, 1) and not any(case.padding) and not any(case.halos)
    return {
        "stride_y": case.stride[0],
        "stride_x": case.stride[1],
        "top": case.padding[0],
        "left": case.padding[2],
        "panels": plan.panels,
        "blocks": plan.blocks,
        "panel_bytes": plan.cover // INT4_CHANNELS * panel_line_bytes(plan.blocks)
        if case.int4
        else case.taps[0] * (1 if plan.joined else taps) * plan.run * 64 * plan.blocks,
        "mask": _signed(plan.mask),
        "last_mask": _signed(plan.last_mask),
        "flat": int(flat),
        "rows": case.rows,
        "lines": case.lines,
        "split_channels_below": case.split_channels_below,
        "chunk_bytes": case.chunk_bytes,
        "tile.a_pixel": case.stride[1] * image.pixel,
        "tile.tap_rows": case.taps[0],
        "tile.a_row": case.dilation[0] * (image.width + 2 * image.halo) * image.pixel,
        "tile.taps": taps,
        "tile.a_tap": case.dilation[1] * image.pixel,
        "tile.run": plan.run // case.row_taps,
        "tile.levels": case.levels,
    }


def _signed(mask: int) -> int:
    """64 bits as the int64_t they are held in."""
    return mask - (mask >> 63 << 64)


def _operands(case: Case, given: CaseData, plan: PanelPacking) -> dict[str, int]:
    """Packed constants, each up to a guard page."""
    zero_x, zero_y, zero_other = case.zero_points
    zero_y = numerics.widen_to_16bit(1, zero_y).zero_point if case.remainder else zero_y
    zero_other = numerics.widen_to_16bit(1, zero_other).zero_point if case.residual_remainder else zero_other
    folded = given.bias.astype(np.int64) - zero_x * given.weight.astype(np.int64).reshape(len(given.weight), -1).sum(1)
    packed = pack_int4(given.weight[..., 0, 0], plan) if case.int4 else pack_weights(given.weight, plan, case.groups)
    found = {
        "tile.b": memory("weight").hold(packed),
        "tile.bias": memory("bias").hold(pack_columns(folded.astype(np.int32), plan)),
        "tile.factor": memory("factor").hold(pack_columns(given.factor, plan)),
        "tile.limits": memory("limits").hold(limits(zero_y, *bounds_of(case), zero_other, case.remainder)),
        "tile.out_pixel": given.expected.shape[1] * given.expected.itemsize,
        "out_bytes": given.expected.itemsize,
    }
    found["tile.remainder_pixel"] = given.expected.shape[1]
    if case.transformed:
        found["transformed"] = memory("transformed").hold(transform_weights(given.weight, plan))
    if given.row_scales is not None:
        found["tile.row_scale"] = memory("row scale").hold(given.row_scales)
        found["tile.row_bias"] = memory("row bias").hold(pack_columns(given.row_bias, plan))
    if given.residual is not None:
        found["tile.residual_pixel"] = found["tile.residual_remainder_pixel"] = given.residual.shape[1]
        found["tile.residual_factor"] = memory("other factor").hold(pack_columns(given.residual_factor, plan))
    return found


@st.composite
def cases(draw, isa: str, results: tuple[str, ...] | None = None) -> Case:
    """A convolution, small but with no size a multiple of anything, and any way to compute it."""
    few = st.integers(0, 3)
    taps, dilation = draw(st.tuples(st.integers(1, 7), st.integers(1, 7))), draw(st.tuples(*[st.integers(1, 3)] * 2))
    if draw(st.booleans()):
        taps, dilation = (1, 1), (1, 1)
    padding = draw(st.sampled_from([(0, 0, 0, 0), draw(st.tuples(few, few, few, few))]))
    spans = [dilation[i] * (taps[i] - 1) + 1 - padding[2 * i] - padding[2 * i + 1] for i in (0, 1)]
    height, width = (max(span, 0) + draw(st.integers(1, extra)) for span, extra in zip(spans, (5, 40), strict=True))
    groups = draw(st.sampled_from([1, 1, 2, 3, 7, 40]))
    per_group, per_group_out = draw(st.integers(1, 40 // groups)), draw(st.integers(1, 150 // groups))
    if groups > 1 and draw(st.booleans()):
        per_group, per_group_out = 1, 1
    blocks = draw(st.sampled_from(sorted(ISAS[isa].max_tile_rows)))
    result = draw(st.sampled_from(results or RESULTS))
    looks_up = ["kernel"] * (HAS_VBMI and bool(ISAS[isa].lookup_condition))
    table = draw(st.sampled_from(["none", "none", "after", *looks_up])) if result == "u8" else "none"
    level = st.sampled_from([0, 255, *range(1, 255)])
    rows = draw(st.integers(1, ISAS[isa].max_tile_rows[blocks]))
    bounds = draw(st.sampled_from([(0, 255), tuple(sorted(draw(st.tuples(level, level))))]))
    return Case(
        images=draw(st.sampled_from([1, 2, 5, 0, 3, 4])),
        height=height,
        width=width,
        per_group=per_group,
        per_group_out=per_group_out,
        groups=groups,
        taps=taps,
        dilation=dilation,
        padding=padding,
        bounds=bounds,
        stride=draw(st.sampled_from([(1, 1), draw(st.tuples(*[st.integers(1, 3)] * 2))])),
        halos=draw(st.sampled_from([(0, 0, 0), draw(st.tuples(few, few, few))])),
        zero_points=draw(st.tuples(level, *[st.just(0) | level] * 2)),
        exponent=draw(st.none() | st.integers(-20, 20)),
        extreme=draw(st.booleans()),
        result=result,
        blocks=blocks,
        saturates=draw(st.booleans()),
        table=table,
        rows=rows,
        lines=draw(st.integers(0, rows // LINE_PIXELS)) if ISAS[isa].has_setup else 0,
        keeps_setup=draw(st.booleans()),
        guard=draw(st.booleans()),
        widened=ISAS[isa].widens and draw(st.booleans()),
        threads=draw(st.integers(1, 3)),
        split_channels_below=draw(st.sampled_from([0, 1 << 40])),
        levels=draw(st.integers(0, 2)),
        chunk_bytes=draw(st.sampled_from([1, 300, 5000, 1 << 20])),
        seed=draw(st.integers(0, 1 << 30)),
        behind=draw(st.sampled_from([0, 256])),
        remainder=draw(st.booleans()) and result in PACKED_RESULTS and table == "none",
        residual_remainder=draw(st.booleans()) and result == "add",
    )
