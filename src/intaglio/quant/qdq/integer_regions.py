"""Integer regions of a Q/DQ graph: the operators between dequantize and quantize that one kernel runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import fx

from intaglio import numerics
from intaglio.fusion.fusion_record import Fusion, match_rows
from intaglio.fusion.table import GRAPH_FUSIONS
from intaglio.fxgraph.fx_graph_view import FxGraphView
from intaglio.fxgraph.node_info import info, update_info
from intaglio.fxgraph.nodes import (
    activations,
    call_of,
    is_constant,
    known_record,
    layer_operands,
    operands,
    operator,
    record_of,
)
from intaglio.ir import SIGN_OFFSET, DType, QParams
from intaglio.quant.annotate.per_token import dynamic_operands
from intaglio.quant.annotate.regions import Chain, Region, RegionMark, mark_operators
from intaglio.quant.qdq.qdq_normalize import (
    DEQUANTIZE_CHANNEL,
    DEQUANTIZE_TENSOR,
    QUANTIZE_CHANNEL,
    QUANTIZE_TENSOR,
    dequantizes,
)
from intaglio.quant.recipes.user_patterns import CompositeMatch, composite_operands
from intaglio.signature import DTYPES


@dataclass(frozen=True)
class IntegerRegion(Chain):
    """A chain of operators between dequantize and quantize.

    Attributes:
        result: parameters of the quantized result; ``None`` if the region returns float.
        result_16bit: parameters of the 16-bit result that the 8-bit one is derived from, if there is one.
    """

    result: QParams | None
    result_16bit: QParams | None = None


def dequantized_qparams(node: fx.Node | None, dtype: DType = DType.U8) -> QParams | None:
    """Return the parameters of the quantized activation that `node` dequantizes; ``None`` for any other node."""
    if node is None or operator(node) not in (DEQUANTIZE_TENSOR, DEQUANTIZE_CHANNEL) or is_constant(node.args[0]):
        return None
    if info(node).observer is not None:
        return None
    return _qparams(node, dtype)


def quantize_qparams(node: fx.Node, dtype: DType = DType.U8) -> QParams | None:
    """Return the parameters of a quantize to `dtype` (u8 or u16); ``None`` for any other node."""
    return (
        _qparams(node, dtype)
        if operator(node) in (QUANTIZE_TENSOR, QUANTIZE_CHANNEL) and info(node).observer is None
        else None
    )


def image_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return image, gain and shift of a per-channel quantize of ``image * gain + shift``, else ``None``."""
    if operator(node) != QUANTIZE_CHANNEL or operator(node.args[0]) != "aten.addcmul.default":
        return None
    shift, image, gain = node.args[0].args
    return (image, gain, shift) if is_constant(gain) and is_constant(shift) else None


def _qparams(node: fx.Node, dtype: DType) -> QParams | None:
    *axis, low, high, given = node.args[3:]
    signed = dtype is DType.U8 and not axis and DTYPES.get(given) is DType.S8
    if DTYPES.get(given) is not dtype and not signed:
        return None
    if not axis:
        q = QParams((float(node.args[1]),), (int(node.args[2]),), int(low), int(high))
        return q.with_offset(SIGN_OFFSET) if signed else q
    scale, zero_point = (getattr(node.graph.owning_module, constant.target).tolist() for constant in node.args[1:3])
    return QParams(tuple(scale), tuple(zero_point), int(low), int(high), *axis)


def dequantized_constant(node: fx.Node | None, dtype: DType) -> fx.Node | None:
    """Return the integer constant that `node` dequantizes to a weight or bias; ``None`` for any other node."""
    if node is None or operator(node) not in (DEQUANTIZE_TENSOR, DEQUANTIZE_CHANNEL) or not is_constant(node.args[0]):
        return None
    if info(node).observer is not None:
        return None
    given = node.args[5] if operator(node) == DEQUANTIZE_TENSOR else node.args[6]
    return node.args[0] if DTYPES.get(given) is dtype else None


def keep_regions(graph: fx.Graph) -> int:
    """Keep the annotated regions of a graph that run on integers, and return their number.

    The graph is a reference model or a part of one. A part may begin or end inside a region, or return a value from
    inside of it; such a region is split, and those of its operators that run on integers by themselves are kept. No
    pattern is matched here.
    """
    found = _composites(graph)
    taken = {node for _, region in found for node in region.nodes}
    for mark, nodes in marked_operators(graph).items():
        if taken.intersection(nodes):
            continue
        nodes = [
            node for node in nodes if record_of(node) is not None
        ]  # skip the nodes that `convert` replaced an operator with
        chains = [(node,) for node in nodes]
        returns_inside = any(user.op == "output" for node in nodes[:-1] for user in node.users)
        if nodes and len(nodes) == mark.size and not returns_inside and _is_integer(tuple(nodes)):
            found.append((mark.fusion, _region_of(tuple(nodes))))
        else:
            found += [(known_record(chain[0]).name, _region_of(chain)) for chain in chains if _is_integer(chain)]
    return _mark_in_order(graph, found)


def match_regions(graph: fx.Graph) -> int:
    """Match the fusion rows on a Q/DQ graph without annotations, mark each region, and return their number."""
    return _mark_in_order(
        graph, [(name, _region_of(chain)) for name, chain in _match_fusions(graph, set(), _is_integer)]
    )


def write_regions(graph: fx.Graph, regions: Iterable[Region]) -> None:
    """Mark the regions that annotation found on their operators, for `keep_regions` to read.

    Annotation ignores operators that were quantized before. Fusion rows are matched on those here, by their inputs
    alone: their results may still become quantized with the rest of the graph.
    """
    found = [region.matched for region in regions]
    if any(map(dequantizes, graph.nodes)):
        found += _match_fusions(graph, {node for _, nodes in found for node in nodes}, _takes_integers)
    mark_operators(graph, found)


def _match_fusions(
    graph: fx.Graph, taken: set[fx.Node], is_valid: Callable[[tuple[fx.Node, ...]], bool]
) -> list[tuple[str, tuple[fx.Node, ...]]]:
    """Match the fusion rows, longest first, then single operators, on nodes that are not `taken`."""
    nodes, taken = [node for node in graph.nodes if record_of(node) is not None], set(taken)

    def accept(row: Fusion, chain: tuple[fx.Node, ...]) -> tuple[str, tuple[fx.Node, ...]] | None:
        return (row.name, chain) if is_valid(chain) else None

    found = match_rows(GRAPH_FUSIONS, nodes, FxGraphView(graph), accept, taken)
    return found + [(known_record(node).name, (node,)) for node in nodes if node not in taken and is_valid((node,))]


def _mark_in_order(graph: fx.Graph, found: list[tuple[str, IntegerRegion]]) -> int:
    place = {node: index for index, node in enumerate(graph.nodes)}
    found = sorted(found, key=lambda item: place[item[1].root])
    mark_operators(graph, ((name, region.nodes) for name, region in found))
    return len(found)


def marked_operators(graph: fx.Graph) -> dict[RegionMark, list[fx.Node]]:
    """Return the operators of every marked region of a graph, in the order of regions and operators."""
    chains: dict[RegionMark, list[fx.Node]] = {}
    for node in graph.nodes:
        if (
            node.op == "call_function" and (mark := info(node).region) is not None
        ):  # a placeholder of a subgraph may carry the mark of a value in a region
            chains.setdefault(mark, []).append(node)
    return dict(sorted(chains.items(), key=lambda item: item[0].index))


def marked_regions(graph: fx.Graph) -> list[IntegerRegion]:
    """Return the regions that `keep_regions` or `match_regions` left on a graph, in execution order."""
    return [
        _composite_region(nodes) if info(nodes[-1]).composite is not None else _region_of(tuple(nodes))
        for nodes in marked_operators(graph).values()
    ]


def _composites(graph: fx.Graph) -> list[tuple[str, IntegerRegion]]:
    """Find the composites that annotation marked whose inputs and result are quantized. Attention may return floats.

    In a part that begins or ends inside a composite, its operators are operators of their own.
    """
    groups: dict[CompositeMatch, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and info(node).composite is not None:
            groups.setdefault(info(node).composite, []).append(node)
    found = []
    for composite, nodes in groups.items():
        if not {name for name, _ in composite.reads} <= {node.name for node in nodes}:
            for node in nodes:
                update_info(node, composite=None)
            continue
        values, region = composite_operands(nodes, composite), _composite_region(nodes)
        can_run = region.result is not None or composite.record.is_attention
        if can_run and all(dequantized_qparams(values[index]) for index in composite.record.roles.x):
            found.append((composite.record.name, region))
    return found


def _composite_region(nodes: Sequence[fx.Node]) -> IntegerRegion:
    results = {quantize_qparams(user) for user in nodes[-1].users}
    return IntegerRegion(tuple(nodes), results.pop() if len(results) == 1 else None)


def _region_of(nodes: tuple[fx.Node, ...]) -> IntegerRegion:
    """Return the region of a chain, with the parameters of its result if all its readers agree on them."""
    if dynamic_operands(operands(nodes[0])[0]) is not None or known_record(nodes[0]).row_groups:
        return IntegerRegion(nodes, None)
    results = {_result(user) for user in nodes[-1].users}
    wide = {quantize_qparams(user, DType.U16) for user in nodes[-1].users}
    if len(results) == len(wide) == 1 and None not in results:
        return IntegerRegion(nodes, results.pop(), wide.pop())
    return IntegerRegion(nodes, None)


def _takes_integers(nodes: tuple[fx.Node, ...]) -> bool:
    """Return whether every operand from outside the chain is quantized."""
    if dynamic_operands(operands(nodes[0])[0]) is not None:
        return len(nodes) == 1 and _has_s8_weight(nodes[0])
    return all(_is_integer_operator(node, nodes) for node in nodes)


def _is_integer(nodes: tuple[fx.Node, ...]) -> bool:
    """Return whether a chain reads quantized operands only and returns quantized values or a plain accumulator."""
    if not _takes_integers(nodes):
        return False
    if dynamic_operands(operands(nodes[0])[0]) is not None:
        return True
    record, region = known_record(nodes[0]), _region_of(nodes)
    if len(nodes) == 1 and record.shares_qparams and not record.variadic:
        x = operands(nodes[0])[0]
        results, wide = (
            {_result(user) for user in nodes[0].users},
            {quantize_qparams(u, DType.U16) for u in nodes[0].users},
        )
        if wide != {dequantized_qparams(x, DType.U16)} or (wide == {None} and results != {dequantized_qparams(x)}):
            return False
    plain = all(known_record(node).multiplies_by_scalar for node in nodes[1:])
    return region.result is not None or (plain and record.accumulates)


def _result(user: fx.Node) -> QParams | None:
    """Return the u8 parameters that a reader quantizes a float value to.

    A reader that quantizes to 16 bits gives the parameters of the u8 value made from them.
    """
    if (wide := quantize_qparams(user, DType.U16)) is None:
        return quantize_qparams(user)
    again = (quantize_qparams(quantize) for real in user.users for quantize in real.users)
    plain = QParams(
        (float(np.float32(numerics.QUANT_STEPS * wide.step)),),
        (wide.zero // numerics.QUANT_STEPS,),
        wide.qmin // numerics.QUANT_STEPS,
        wide.qmax // numerics.QUANT_STEPS,
    )
    return next((q for q in again if q is not None), plain)


def _has_s8_weight(node: fx.Node) -> bool:
    """Return whether the operator has a weight that is stored as s8."""
    weight = known_record(node).roles.weight
    return weight is not None and dequantized_constant(operands(node)[weight], DType.S8) is not None


def _is_integer_operator(node: fx.Node, region: tuple[fx.Node, ...]) -> bool:
    """Return whether an operator's operands are quantized or come from its region, and its record accepts the call."""
    record = known_record(node)
    carries = record.adds or (record.moves_data and not record.variadic)
    for value in activations(node):
        q = dequantized_qparams(value) or (dequantized_qparams(value, DType.U16) if carries else None)
        if q is None and value not in region:
            return False
    if record.roles.weight is not None:
        if not _has_s8_weight(node):
            return False
        bias = layer_operands(node).bias
        if bias is not None and dequantized_constant(bias, DType.I32) is None:
            return False
    call = call_of(node, record)
    if record.roles.weight is not None:  # the weight is dequantized here, but it is still a constant
        x, _, bias_is_constant, *others = call.constant
        call = replace(call, constant=(x, True, None if bias_is_constant is None else True, *others))
    return record.check(call) is None
