"""The table of fusions: which operators become one operator, one loop, one lookup table or one kernel.

Each fusion has a pattern, the kind of graph it is matched on, its purpose, and a side condition. Each tuple belongs to
one stage, which calls `Fusion.find` and applies the matches; `GRAPH_FUSIONS` are matched while a model is annotated,
and later stages read the result.

Two algorithms do more than the table says. The scores of attention may be scaled and masked any number of times, in any
order, between product and softmax: the table finds the softmax between two products, and `fxgraph.fuse_attention` walks
the scores. Loops are merged in pairs until nothing changes, since a merged loop may fit a third one: the table says
which pairs, and `plan.graph_passes.loop_merging` the order.
"""

from __future__ import annotations

from intaglio.fusion.conditions import (
    adds_without_broadcast,
    keeps_shape,
    scales_by_positive_number,
    scales_output_channels,
)
from intaglio.fusion.fusion_record import Fusion, FusionLevel, check_longest_first
from intaglio.fusion.loop_conditions import (
    computes_same_rows,
    dequantizes_uniformly,
    maps_quantized_to_quantized,
    result_is_only_quantized,
)
from intaglio.fusion.partition_conditions import makes_one_result, runs_on_tiles, scales_pixel_channels
from intaglio.fusion.pattern import op, reads, seq, wildcard
from intaglio.ops import ACCUMULATING, ADD_OPS, ANCHORS, OPS, PRECISE_FUNCTIONS, SCALAR_OPS
from intaglio.ops.loop_ops.primitives import PRIMITIVES
from intaglio.ops.pointwise import MUL

CONVOLUTIONS = tuple(record.name for record in OPS.values() if record.convolves)
TAILS = tuple(record.name for record in OPS.values() if record.tail is not None)
"""Operators that read an accumulator."""
LUT_OPS = tuple(record.name for record in OPS.values() if record.follows_product)
QUANTIZE_OPS = tuple(record.name for record in OPS.values() if record.quantizes)
DEQUANTIZE_OPS = tuple(record.name for record in OPS.values() if record.dequantizes)
APPROXIMATED_FUNCTIONS = tuple(record.name for record in PRIMITIVES.values() if record.approximation)
MATMUL_TARGETS = ("aten.matmul.default", "aten.bmm.default")
SOFTMAX_TARGETS = ("aten.softmax.int", "aten._softmax.default")

GATE_FUSIONS = (
    Fusion(
        "silu",
        op("aten.mul.Tensor", wildcard("x"), op("aten.sigmoid.default", wildcard("x")), commutative=True),
        FusionLevel.CAPTURED,
        "a gate written as a product becomes its function, which kernels of convolutions and linear layers compute",
        where=keeps_shape,
        becomes="aten.silu.default",
    ),
    Fusion(
        "hardswish",
        op("aten.mul.Tensor", wildcard("x"), op("aten.hardsigmoid.default", wildcard("x")), commutative=True),
        FusionLevel.CAPTURED,
        "a gate written as a product becomes its function, which kernels of convolutions and linear layers compute",
        where=keeps_shape,
        becomes="aten.hardswish.default",
    ),
)
ATTENTION_FUSION = Fusion(
    "attention",
    op(MATMUL_TARGETS, op(SOFTMAX_TARGETS, wildcard("scores"), name="probabilities"), wildcard("v")),
    FusionLevel.CAPTURED,
    "attention written with matmul and softmax becomes one kernel, which never stores the scores of all tokens",
)
FUNCTION_AFFINE = Fusion(
    "anchor_function_affine",
    seq(ANCHORS, PRECISE_FUNCTIONS, "affine"),
    FusionLevel.GRAPH,
    "the factors of an equalized value are applied with the function, to the accumulator",
    where=scales_output_channels,
    precise=True,
)
FUNCTION = Fusion(
    "anchor_function",
    seq(ANCHORS, PRECISE_FUNCTIONS),
    FusionLevel.GRAPH,
    "the function is computed in float32 on the accumulator",
    precise=True,
)
GRAPH_FUSIONS = (
    FUNCTION_AFFINE,
    Fusion(
        "anchor_add_clamp",
        op("clamp", op(ADD_OPS, op(ANCHORS, wildcard("x")), wildcard("other"), commutative=True)),
        FusionLevel.GRAPH,
        "the end of a residual block needs no pass over memory",
        where=adds_without_broadcast,
    ),
    Fusion(
        "anchor_add",
        op(ADD_OPS, op(ANCHORS, wildcard("x")), wildcard("other"), commutative=True),
        FusionLevel.GRAPH,
        "a shortcut is added to the accumulator and rounded once",
        where=adds_without_broadcast,
    ),
    Fusion(
        "anchor_clamp", seq(ANCHORS, "clamp"), FusionLevel.GRAPH, "a clamp becomes the bounds of the requantization"
    ),
    Fusion(
        "product_number",
        seq("bmm", SCALAR_OPS),
        FusionLevel.GRAPH,
        "a number after a product of two activations is folded into its scale",
        where=scales_by_positive_number,
    ),
    FUNCTION,
    Fusion(
        "add_clamp",
        op("clamp", op(ADD_OPS, wildcard("a"), wildcard("b"))),
        FusionLevel.GRAPH,
        "a clamp after a sum becomes the bounds of its requantization",
    ),
    Fusion(
        "affine_clamp",
        seq("affine", "clamp"),
        FusionLevel.GRAPH,
        "a clamp after factors per channel becomes the bounds of its requantization",
    ),
)

DEQUANTIZE_LOOP = Fusion(
    "dequantize_loop",
    reads("loop", op(DEQUANTIZE_OPS, shared=True)),
    FusionLevel.INTEGER,
    "a loop reads quantized values and dequantizes them again, which costs less than floats in memory",
    where=dequantizes_uniformly,
)
LOOP_LOOP = Fusion(
    "loop_loop",
    reads(("loop", *QUANTIZE_OPS), op("loop", shared=True)),
    FusionLevel.INTEGER,
    "a value between two loops is not stored, unless another operator reads it",
    where=computes_same_rows,
)
LOOP_TABLE = Fusion(
    "loop_table",
    reads("loop", wildcard("quantized")),
    FusionLevel.INTEGER,
    "a loop from one quantized value to another is a lookup table of 256 entries",
    where=maps_quantized_to_quantized,
)
QUANTIZED_FUNCTION = Fusion(
    "quantized_function",
    op(APPROXIMATED_FUNCTIONS),
    FusionLevel.LOOP_BODY,
    "a function whose result is only quantized needs no more accuracy than the quantized value",
    where=result_is_only_quantized,
)
ACCUMULATOR_FUSIONS = (
    Fusion(
        "product_tail_table",
        seq(ACCUMULATING, TAILS, LUT_OPS),
        FusionLevel.INTEGER,
        "the lookup table is applied while the quantized values are in cache",
        where=makes_one_result,
    ),
    Fusion(
        "product_tail",
        seq(ACCUMULATING, TAILS),
        FusionLevel.INTEGER,
        "int32 accumulators are never stored",
    ),
)
HEAD_FUSIONS = (
    Fusion(
        "product_head",
        op(CONVOLUTIONS, op(MUL.name)),
        FusionLevel.PARTITION,
        "the product of squeeze-and-excite needs no pass over memory and no barrier",
        where=scales_pixel_channels,
    ),
)
EPILOGUE_FUSIONS = (
    Fusion(
        "product_epilogue",
        reads(("loop", *DEQUANTIZE_OPS), op(ACCUMULATING)),
        FusionLevel.PARTITION,
        "a loop or dequantize that is the only reader of a product runs on its tiles while they are in cache",
        where=runs_on_tiles,
    ),
)
FUSIONS = (
    *(ATTENTION_FUSION, *GATE_FUSIONS),
    *GRAPH_FUSIONS,
    *(DEQUANTIZE_LOOP, LOOP_LOOP, LOOP_TABLE, QUANTIZED_FUNCTION),
    *ACCUMULATOR_FUSIONS,
    *HEAD_FUSIONS,
    *EPILOGUE_FUSIONS,
)
"""All fusions, in the order of the stages that match them."""

for _rows in (GATE_FUSIONS, GRAPH_FUSIONS, ACCUMULATOR_FUSIONS, HEAD_FUSIONS, EPILOGUE_FUSIONS):
    check_longest_first(_rows)
