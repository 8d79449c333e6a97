"""Reading a Q/DQ graph: which operators between dequantize and quantize run on integers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from intaglio.calls import DTYPES
from intaglio.capture.nodes import FxView, activations, call_of, is_constant, operands, operator, record_of
from intaglio.ir import DType, QParams
from intaglio.ir.rewrite import match
from intaglio.ops import ANCHORS, FUSIONS
from intaglio.quant.annotate import Chain, fusable

QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
DEQUANTIZE_CHANNEL = "quantized_decomposed.dequantize_per_channel.default"


@dataclass(frozen=True)
class IntegerRegion(Chain):
    """A chain between dequantize and quantize. ``result`` holds the parameters of the levels it gives; ``None`` when it
    gives float."""

    result: QParams | None


def levels_of(node: fx.Node | None) -> QParams | None:
    """Parameters of the u8 levels behind a dequantize of an activation; ``None`` for any other node."""
    if node is None or operator(node) != DEQUANTIZE or is_constant(node.args[0]):
        return None
    return _qparams(node) if DTYPES.get(node.args[5]) is DType.U8 else None


def quantized_to(node: fx.Node) -> QParams | None:
    """Parameters of a quantize to u8; ``None`` for any other node."""
    if operator(node) != QUANTIZE or DTYPES.get(node.args[5]) is not DType.U8:
        return None
    return _qparams(node)


def _qparams(node: fx.Node) -> QParams:
    _, scale, zero_point, low, high = node.args[:5]
    return QParams((float(scale),), (int(zero_point),), int(low), int(high))


def constant_of(node: fx.Node | None, dtype: DType) -> fx.Node | None:
    """The integer constant behind a dequantize of a weight or bias."""
    if node is None or operator(node) not in (DEQUANTIZE, DEQUANTIZE_CHANNEL) or not is_constant(node.args[0]):
        return None
    given = node.args[5] if operator(node) == DEQUANTIZE else node.args[6]
    return node.args[0] if DTYPES.get(given) is dtype else None


def find_regions(graph: fx.Graph) -> list[IntegerRegion]:
    """Fusion rows first, longest first, then single operators; only what can run on integers."""
    view, found = FxView(graph), []
    taken: set[fx.Node] = set()
    nodes = [node for node in graph.nodes if record_of(node) is not None]
    for row in FUSIONS:
        for node in nodes:
            hit = match(row.pattern, node, view) if node not in taken else None
            if hit is not None and not taken.intersection(hit.nodes):
                chain = tuple(sorted(hit.nodes, key=view.position))
                if (region := _region(chain)) is not None:
                    found.append(region)
                    taken.update(chain)
    found += [region for node in nodes if node not in taken and (region := _region((node,))) is not None]
    return sorted(found, key=lambda region: view.position(region.root))


def _region(nodes: tuple[fx.Node, ...]) -> IntegerRegion | None:
    if not fusable(nodes) or not all(_runs_on_integers(node, nodes) for node in nodes):
        return None
    record = record_of(nodes[0])
    results = {quantized_to(user) for user in nodes[-1].users}
    if len(nodes) == 1 and record.shares and not record.variadic and results != {levels_of(operands(nodes[0])[0])}:
        return None
    if len(results) == 1 and None not in results:
        return IntegerRegion(nodes, results.pop())
    return IntegerRegion(nodes, None) if len(nodes) == 1 and record.name in ANCHORS else None


def _runs_on_integers(node: fx.Node, region: tuple[fx.Node, ...]) -> bool:
    record, values = record_of(node), operands(node)
    if any(levels_of(value) is None and value not in region for value in activations(node)):
        return False
    if record.roles.weight is not None:
        if constant_of(values[record.roles.weight], DType.S8) is None:
            return False
        bias = values[record.roles.bias]
        if bias is not None and constant_of(bias, DType.I32) is None:
            return False
    call = call_of(node, record)
    if record.roles.weight is not None:  # weights are behind a dequantize here, and constant all the same
        constant = (call.constant[0], True, None if call.constant[2] is None else True)
        call = replace(call, constant=constant)
    return record.check(call) is None
