"""The table of fusions: which operators become one kernel. Annotation matches it; later stages read what was found."""

from __future__ import annotations

from intaglio.fusion.conditions import adds_without_broadcast, scales_by_positive_number, scales_output_channels
from intaglio.fusion.fusion_record import Fusion, FusionLevel, check_longest_first, rows_at
from intaglio.fusion.pattern import op, seq, wildcard
from intaglio.ops import ANCHORS, NUMBERS, PRECISE_FUNCTIONS, SUMS

FUSIONS = (
    Fusion(
        "anchor_function_affine",
        seq(ANCHORS, PRECISE_FUNCTIONS, "affine"),
        FusionLevel.GRAPH,
        "the factors of an equalized value go with the function, on the accumulator",
        where=scales_output_channels,
        precise=True,
    ),
    Fusion(
        "anchor_add_clamp",
        op("clamp", op(SUMS, op(ANCHORS, wildcard("x")), wildcard("other"), commutative=True)),
        FusionLevel.GRAPH,
        "the end of a residual block without a pass over memory",
        where=adds_without_broadcast,
    ),
    Fusion(
        "anchor_add",
        op(SUMS, op(ANCHORS, wildcard("x")), wildcard("other"), commutative=True),
        FusionLevel.GRAPH,
        "a shortcut is added to the accumulator and rounded once",
        where=adds_without_broadcast,
    ),
    Fusion("anchor_clamp", seq(ANCHORS, "clamp"), FusionLevel.GRAPH, "a rectifier is bounds of the requantization"),
    Fusion(
        "product_number",
        seq("bmm", NUMBERS),
        FusionLevel.GRAPH,
        "a number behind a product of two activations scales its unit",
        where=scales_by_positive_number,
    ),
    Fusion(
        "anchor_function",
        seq(ANCHORS, PRECISE_FUNCTIONS),
        FusionLevel.GRAPH,
        "the function is computed in float32 on the accumulator",
        precise=True,
    ),
    Fusion(
        "add_clamp",
        op("clamp", op(SUMS, wildcard("a"), wildcard("b"))),
        FusionLevel.GRAPH,
        "a rectifier behind a sum is bounds of its requantization",
    ),
    Fusion(
        "affine_clamp", seq("affine", "clamp"), FusionLevel.GRAPH, "a rectifier behind factors per channel is bounds"
    ),
)


GRAPH_FUSIONS = rows_at(FusionLevel.GRAPH, FUSIONS)
check_longest_first(GRAPH_FUSIONS)
