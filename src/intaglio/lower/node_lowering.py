"""Lower the nodes of a reference in an order that keeps the number of float islands low."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from intaglio.errors import UnknownSizeError
from intaglio.fxgraph.float_forms import data_movement_of, float_kernel_of
from intaglio.fxgraph.node_info import info, known_type, origin, tensor_type
from intaglio.fxgraph.nodes import is_constant, known_record, operands, operator, tensor_nodes
from intaglio.ir import Attrs, DType, Op, symbols_of
from intaglio.lower.cut_islands import Unit, extract_island
from intaglio.lower.dynamic_linear import is_dynamic_quantization, lower_dynamic_linear, lower_dynamic_quantize
from intaglio.lower.embedding_bags import arange_attributes, is_embedding_bag_part, lower_arange, lower_embedding_bag
from intaglio.lower.float_operators import (
    DirectCall,
    direct_call,
    loop_call,
    lower_direct,
    lower_float_loop,
    lower_kernel,
)
from intaglio.lower.graph_builder import GraphBuilder
from intaglio.lower.lowered import Island
from intaglio.lower.recurrent_calls import is_recurrent_part, lower_recurrent
from intaglio.lower.region_lowering import lower_region, quantize_node
from intaglio.lower.stored_weights import lower_linear_f32, only_widens_stored_weight, stored_weight
from intaglio.ops import OpDef
from intaglio.ops.loop_ops.loop_builder import FloatCall
from intaglio.quant.annotate.embedding_tables import table_operands
from intaglio.quant.annotate.per_token import dynamic_operands
from intaglio.quant.qdq.integer_regions import (
    IntegerRegion,
    dequantized_constant,
    dequantized_qparams,
    image_operands,
    marked_regions,
    quantize_qparams,
)
from intaglio.tracing.loops.while_loops import loops_of


class NodeLowering:
    """Lowers all nodes of a reference into a `GraphBuilder`.

    Attributes:
        builder: The integer graph.
        regions: Operators between dequantize and quantize nodes, which run on integers.
        float_ops: Float operators that the program runs itself, with their loop or data movement.
        cut: Nodes of each island.
        native: Nodes that the program computes.
        symbols: Names of the dynamic dimensions of the inputs.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.builder = GraphBuilder(module)
        self.regions = marked_regions(module.graph)
        self.float_ops: dict[fx.Node, FloatCall | tuple[OpDef, Attrs] | DirectCall] = {}
        self.cut: list[list[fx.Node]] = []
        self.native = set[fx.Node]()
        inputs = (node for node in module.graph.nodes if node.op == "placeholder")
        self.symbols = frozenset[str]().union(*map(_symbols, inputs))

    def run(self) -> GraphBuilder:
        """Lower all nodes: alternately all native work that is ready, and all other ready work as one island."""
        builder, nodes = self.builder, self.builder.module.graph.nodes
        for node in nodes:
            if node.op == "placeholder":
                builder.inputs.append(builder.add_external(node))
        pending = list(self._units())
        self.native = {node for unit in pending if unit.native for node in unit.nodes}
        while pending:
            ready = next((unit for unit in pending if unit.native and self._ready(unit)), None)
            if ready is not None:
                pending.remove(ready)
                self._lower(ready)
                continue
            batch: list[fx.Node] = []
            for unit in pending:
                if not unit.native and all(n in builder.values or n in batch for n in unit.needs):
                    batch.append(unit.nodes[0])
            pending = [unit for unit in pending if unit.nodes[0] not in batch]
            self._cut_island(batch)
        results = next(node for node in nodes if node.op == "output").args[0]
        builder.outputs = [builder.external_value(node) for node in results]
        return builder

    def _units(self) -> Iterator[Unit]:
        """Yield the regions and single nodes that must be lowered."""
        nodes = self.builder.module.graph.nodes
        inner = {node for region in self.regions for node in region.nodes}
        regions = {region.root: region for region in self.regions}
        returned = {leaf for node in nodes if node.op == "output" for leaf in tensor_nodes(node.args)}
        for node in nodes:
            if node in regions:
                yield _region_unit(regions[node])
            elif node in inner or info(node).dim is not None or node.op in ("placeholder", "output"):
                continue
            elif node.op == "get_attr":
                if node in returned:
                    yield Unit((node,), (), False)
            elif any(image_operands(user) for user in node.users):
                continue
            elif (unit := _native_unit(node)) is not None:
                yield unit
            elif not (only_widens_stored_weight(node) or _only_read_by(node, inner)):
                yield self._float_unit(node)

    def _float_unit(self, node: fx.Node) -> Unit:
        """Return the unit of a float operator: a loop or data movement of the program, or part of an island."""
        read = tensor_nodes((node.args, node.kwargs))
        needs = [n for n in read if n.op != "get_attr" and info(n).dim is None]
        kind = tensor_type(node)
        is_buffer = kind is not None and kind.q is not None  # a quantized buffer of the model
        module = self.builder.module
        computed = None if is_buffer else loop_call(node, module) or direct_call(node)
        found = computed or float_kernel_of(node) or data_movement_of(node)
        if not all(_symbols(value) <= self.symbols for value in (node, *needs)):
            found = None  # only PyTorch computes sizes that depend on values
        if found is not None:
            self.float_ops[node] = found
        return Unit((node,), tuple(dict.fromkeys(needs)), found is not None)

    def _ready(self, unit: Unit) -> bool:
        return all(node in self.builder.values for node in unit.needs)

    def _lower(self, unit: Unit) -> None:
        """Add the values and operators of a region or node whose operands are available."""
        builder, node = self.builder, unit.nodes[0]
        if unit.region is not None and dynamic_operands(operands(node)[0]):
            lower_dynamic_linear(builder, unit.region)
        elif unit.region is not None:
            lower_region(builder, unit.region)
        elif is_dynamic_quantization(node):
            lower_dynamic_quantize(builder, node)
        elif is_recurrent_part(node):
            lower_recurrent(builder, node)
        elif is_embedding_bag_part(node):
            lower_embedding_bag(builder, node)
        elif stored_weight(node):
            lower_linear_f32(builder, node)
        elif attrs := arange_attributes(node):
            lower_arange(builder, node, attrs)
        elif table := table_operands(node):
            builder.values[node] = builder.add_parameter(table[0])
        elif dequantized_qparams(node) or dequantized_qparams(node, DType.U16) or quantize_qparams(node, DType.U16):
            builder.values[node] = builder.quantized_value(node.args[0])
        elif node in self.float_ops:
            found = self.float_ops[node]
            if isinstance(found, FloatCall):
                lower_float_loop(builder, node, found)
            elif isinstance(found, DirectCall):
                lower_direct(builder, node, found)
            else:
                lower_kernel(builder, node, *found)
        else:
            q = quantize_qparams(node)
            assert q is not None, f"{node} does not quantize"
            quantize_node(builder, node, q)

    def _cut_island(self, nodes: list[fx.Node]) -> None:
        """Add an island with these nodes, which the runtime calls."""
        builder = self.builder
        key = f"island{len(builder.islands)}"
        hidden = [node for node in nodes if not _has_known_size(node, self.symbols)]
        for node in hidden:
            if any(user.op == "output" or user in self.native for user in node.users):
                raise _unknown_size(node)
        own = {*nodes, *self._recomputed(nodes)}
        ordered = [node for node in builder.module.graph.nodes if node in own]
        part = extract_island(builder.module, ordered, set(nodes).difference(hidden))
        for node in nodes:
            builder.values.setdefault(node, "")
        if not part.outputs:  # the islands that read the values compute them
            return
        inputs = [builder.external_value(node) for node in part.inputs]
        outputs = [builder.add_external(node) for node in part.outputs]
        found = [node.target for node in loops_of(part.module)]
        loops = {loop.name: (loop.carried, loop.condition.module) for loop in found}
        builder.islands[key] = Island(part.module, part.dims, tuple(operator(node) for node in ordered), loops)
        builder.ops.append(Op("island", tuple(inputs), tuple(outputs), {"key": key}, origin=origin(nodes[0])))
        self.cut.append(nodes)

    def _recomputed(self, nodes: list[fx.Node]) -> set[fx.Node]:
        """Return the nodes of earlier islands that these nodes read and that have no place in a program's memory.

        Their sizes depend on values, or they are several tensors, or only such nodes of their island read them. Every
        island that reads them computes them again.
        """
        found, waiting = set[fx.Node](), list(nodes)
        while waiting:
            for source in waiting.pop().all_input_nodes:
                computed = source.op == "call_function" and source not in found and source not in nodes
                stored = _has_known_size(source, self.symbols) and self.builder.values.get(source) != ""
                if computed and not stored:
                    found.add(source)
                    waiting.append(source)
        return found


def _symbols(node: fx.Node) -> frozenset[str]:
    """Return the names of the dynamic dimensions of a value."""
    kind = tensor_type(node)
    return frozenset[str]().union(*map(symbols_of, kind.shape)) if kind is not None else frozenset()


def _has_known_size(node: fx.Node, symbols: frozenset[str]) -> bool:
    """Return whether a node is a tensor, or a number, whose size follows from those of the inputs."""
    kind, dim = tensor_type(node), info(node).dim
    return (dim is not None and symbols_of(dim) <= symbols) or (kind is not None and _symbols(node) <= symbols)


def _unknown_size(node: fx.Node) -> UnknownSizeError:
    """Return the error for a value that a program reads or returns although its size depends on values."""
    where = origin(node)
    shape = ", ".join(map(str, known_type(node).shape))
    problem = f"its result has the shape [{shape}], which depends on the values of the inputs"
    remedy = "quantize the model with intaglio.eager, which takes sizes as they come"
    return UnknownSizeError(where.path or "model", where.operator, problem, remedy=remedy, source=where.source)


def _region_unit(region: IntegerRegion) -> Unit:
    """Return the unit of a region with the quantized values that it reads."""
    needs = [v for n in region.nodes for v in operands(n) if v is not None and v not in region.nodes]
    needs = [n for n in needs if dequantized_qparams(n) or dequantized_qparams(n, DType.U16) or dynamic_operands(n)]
    if region.record.row_groups:
        needs += [ends for ends in operands(region.anchor)[-1:] if ends is not None and not is_constant(ends)]
    if region.record.is_attention:
        needs = [value for value in region.operands() if value is not None and not is_constant(value)]
    return Unit(region.nodes, tuple(needs), True, region)


def _native_unit(node: fx.Node) -> Unit | None:
    """Return the unit of a node that the integer graph computes outside regions, or None for other nodes."""
    if image := image_operands(node):
        return Unit((node,), image[:1], True)
    if any(quantize_qparams(node, dtype) or dequantized_qparams(node, dtype) for dtype in (DType.U8, DType.U16)):
        return Unit((node,), () if is_constant(node.args[0]) else (node.args[0],), True)
    if arange_attributes(node) is not None:
        return Unit((node,), (), True)
    if is_dynamic_quantization(node) or is_recurrent_part(node) or is_embedding_bag_part(node):
        needs = [leaf for leaf in tensor_nodes(node.args) if leaf.op != "get_attr"]
        return Unit((node,), tuple(needs), True)
    if stored_weight(node):
        x, *_, last = operands(node)
        read = (x, last) if known_record(node).row_groups else (x,)
        return Unit((node,), tuple(value for value in read if not is_constant(value)), True)
    return Unit((node,), (), True) if table_operands(node) else None


def _only_read_by(node: fx.Node, inner: set[fx.Node]) -> bool:
    """Return whether a node dequantizes a weight or bias, and only nodes of regions read it."""
    constant = dequantized_constant(node, DType.S8) or dequantized_constant(node, DType.I32)
    return constant is not None and inner.issuperset(node.users)
