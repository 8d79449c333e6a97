"""`requantize`: lower a reference model (torch.fx graph with Q/DQ nodes) to an integer graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from torch import fx

from intaglio.argument_checks import check_arguments_except
from intaglio.errors import UnsupportedError
from intaglio.fxgraph.node_info import origin
from intaglio.fxgraph.nodes import operands, operator
from intaglio.ir import Graph, Signature
from intaglio.ir.rewrite import run_passes
from intaglio.lower.embedding_bags import is_embedding_bag_part
from intaglio.lower.facts.collect_facts import LoweringResult, facts_of
from intaglio.lower.lowered import Lowered
from intaglio.lower.node_lowering import NodeLowering
from intaglio.lower.stored_weights import stored_weight
from intaglio.ops import OpDef, verify, wrong_shapes
from intaglio.plan.graph_passes.integer_passes import INTEGER_PASSES
from intaglio.quant.annotate.embedding_tables import table_operands
from intaglio.quant.annotate.recurrent_sites import RECURRENT_CALL
from intaglio.quant.annotate.refusals import is_added_cast, macs
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.annotate.sites import Skip
from intaglio.quant.qdq.convert import Reference
from intaglio.tracing.captured import expect
from intaglio.tracing.loops.while_loops import replace_loop_bodies


@check_arguments_except("reference")
def requantize(reference: Reference) -> Lowered:
    """Lower a reference model to an integer graph.

    Each region between dequantize and quantize nodes is computed with int32 accumulators and a single requantize at its
    end. All other operators become loops of the program, or float islands, which are as few as the order of execution
    allows.

    Args:
        reference: the reference model of `convert` or `from_qdq`.

    Returns:
        The integer graph, whose ``text()`` prints it.

    Examples:
        >>> lowered = stages.requantize(reference)
        >>> int8 = stages.compile(lowered)
    """
    expect(reference, Reference, "requantize")
    nodes = NodeLowering(reference.module)
    builder = nodes.run()
    graph, _ = run_passes(verify(builder.graph(), "requantize"), INTEGER_PASSES, verify)
    _check_shapes(graph, builder.hosts)
    stacks = [node for node in builder.items if operator(node) == RECURRENT_CALL]
    integer = sum(macs(node) for region in nodes.regions for node in region.nodes) + sum(map(macs, stacks))
    total = sum(macs(node) for node in reference.module.graph.nodes)
    inside = {node.name for region in nodes.regions for node in region.nodes}.union(node.name for node in stacks)
    inside |= _float_tails(reference.annotations, inside)
    own = [*nodes.float_ops, *(node for node in builder.values if is_embedding_bag_part(node) or stored_weight(node))]
    inside |= {node.name for node in own if any(map(table_operands, node.args))}
    floats = tuple(skip for skip in reference.annotations.skipped if skip.node not in inside)
    floats += _simulated_operators(reference.annotations, inside)
    simulated = {site.value: site.datatype for site in reference.annotations.sites if not site.native}
    floats += _islands_without_reason(nodes.cut, {skip.node for skip in floats}, simulated)
    counted, floats = _counted_once(reference.module.graph, inside, floats)
    bodies = {name: requantize(body) for name, body in reference.bodies.items()}
    for island in builder.islands.values():
        replace_loop_bodies(island.module, bodies)
    native = frozenset(node.name for node in own)
    lowered = Lowered(
        graph,
        builder.islands,
        _with_types(reference.signature, graph),
        floats,
        (integer, total),
        len(counted),
        reference.model_info,
        builder.hosts,
        native,
        bodies,
        frozenset(inside),
        {node.name: value for node, value in builder.values.items()},
    )
    notes = tuple(
        f"the loop {name} runs in Python; its body is a program of its own, which is counted once" for name in bodies
    )
    computed = frozenset(name for op in graph.ops for name in op.outputs)
    result = LoweringResult(lowered.integer, native, floats, lowered.values, computed)
    texts = {"integer": lowered.text(), "operators": facts_of(reference, result).to_json()}
    return replace(lowered, model_info=reference.model_info.with_stage(notes, **texts))


def _check_shapes(graph: Graph, hosts: Mapping[str, OpDef]) -> None:
    """Check the shapes that torch.export stated for calls of any size; kernels rely on them.

    Raises:
        UnsupportedError: An operator computes another shape.
    """
    for op, shape in wrong_shapes(graph, hosts):
        computed, stated = (", ".join(map(str, sizes)) for sizes in (shape, graph.types[op.output].shape))
        raise UnsupportedError(
            op.origin.path or op.output,
            op.origin.operator or op.kind,
            f"it computes the shape [{computed}], but torch.export states [{stated}]",
            remedy="capture the model with an example of larger sizes, or leave these sizes out of dynamic_shapes",
            source=op.origin.source,
        )


def _float_tails(annotations: Annotations, inside: Collection[str]) -> set[str]:
    """Return the operators that kernels of the given anchors compute in float32, from their accumulators."""
    regions = [region for region in annotations.regions if region.anchor.name in inside]
    return {node.name for region in regions for node in region.float_tail}


def _with_types(signature: Signature, graph: Graph) -> Signature:
    """Return the signature with the types of a graph's inputs, which may have quantization parameters."""
    pairs = zip(signature.inputs, graph.inputs, strict=False)  # mutable buffers follow the inputs
    return replace(signature, inputs=tuple(replace(entry, type=graph.types[name]) for entry, name in pairs))


def _counted_once(
    graph: fx.Graph, inside: Collection[str], floats: Iterable[Skip]
) -> tuple[set[str], tuple[Skip, ...]]:
    """Count an operator of the model once if capture expressed it by several, such as a mean by a pool and a reshape.

    Args:
        graph: the reference.
        inside: names of operators in int8.
        floats: operators in float.

    Returns:
        One name for each operator all of whose parts are in int8, and the first part in float of each other operator.
    """
    first: dict[str, str] = {}
    for node in graph.nodes:
        where, sources = origin(node), [_computed_value(value) for value in node.all_input_nodes]
        is_part = node.op == "call_function" and where.operator not in ("", operator(node)) and not is_added_cast(node)
        same = [value for value in sources if is_part and value.name in first and origin(value) == where]
        first[node.name] = first[same[0].name] if same else node.name
    left: dict[str, Skip] = {}
    for skip in floats:
        left.setdefault(first.get(skip.node, skip.node), skip)
    return {first.get(name, name) for name in inside} - left.keys(), tuple(left.values())


def _computed_value(node: fx.Node) -> fx.Node:
    """Return the operator whose value a node quantizes or dequantizes, or the node itself."""
    while operator(node).startswith("quantized_decomposed.") and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _islands_without_reason(
    islands: Iterable[list[fx.Node]], named: set[str], simulated: Mapping[str, str]
) -> tuple[Skip, ...]:
    """Return the islands that contain no operator with a known reason to stay in float, one `Skip` for each.

    The program is interrupted for these islands as for others, so reports must list them.

    Args:
        islands: Nodes of each island.
        named: Names of the nodes with a known reason.
        simulated: Data types that no kernel computes with, by the name of the value.
    """
    computing = [[node for node in nodes if operator(node)] for nodes in islands]
    silent = [nodes[0] for nodes in computing if nodes and not named.intersection(node.name for node in nodes)]
    return tuple(_cast(n) if is_added_cast(n) else Skip(n.name, _reason_of(n, simulated), origin(n)) for n in silent)


def _cast(node: fx.Node) -> Skip:
    """Return the entry for a cast that capture added, which begins an island."""
    reason = "the program computes in float32, and PyTorch casts values of another type"
    return Skip(node.name, reason, replace(origin(node), operator=operator(node)), is_added=True)


def _reason_of(node: fx.Node, simulated: Mapping[str, str]) -> str:
    """Return why the first node of an island stays in PyTorch."""
    rounded = next((simulated[v.name] for v in node.all_input_nodes if v.name in simulated), None)
    if rounded is not None and "quantize" in operator(node):
        return f"no kernel computes with {rounded} values, so PyTorch rounds them"
    return "it computes integers or booleans, which stay in PyTorch"


def _simulated_operators(annotations: Annotations, inside: set[str]) -> tuple[Skip, ...]:
    """Return the operators that run in float on rounded values, because no kernel supports their types."""
    found = []
    for region in annotations.regions:
        values = {value.name for node in region.nodes for value in (node, *operands(node)) if value is not None}
        names = sorted({site.datatype for site in annotations.sites if site.value in values and not site.native})
        if names:
            reason = f"no kernel computes with {' and '.join(names)} values, so it runs in float32 on rounded values"
            found += [Skip(n.name, reason, origin(n), macs(n)) for n in region.nodes if n.name not in inside]
    return tuple(found)
