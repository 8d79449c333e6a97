"""Import of a quantized model with its own scales and zero points, without calibration."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from intaglio.errors import UnsupportedError
from intaglio.fxgraph.graph_passes import copy_graph, run
from intaglio.fxgraph.node_info import info, known_type, origin, tensor_type
from intaglio.fxgraph.nodes import activations, is_constant, operands, operator, record_of
from intaglio.ir import DType
from intaglio.quant.annotate.find_sites import ValueNames
from intaglio.quant.annotate.refusals import skipped
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.annotate.sites import Fixed, Site
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.integer_regions import match_regions
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.qdq.prepare_passes import PTQ_PASSES
from intaglio.quant.qdq.qdq_normalize import LIBRARY, QUANTIZE_TENSOR, dequantizes
from intaglio.quant.qdq.qparams import fixed_qparams
from intaglio.quant.recipes.choices import Role
from intaglio.tracing.captured import Captured, expect, fx_text


def from_qdq(captured: Captured) -> Reference:
    """Convert a captured graph with quantize and dequantize operators to a `Reference`.

    The sites of the reference are the quantized activations; the scales of weights remain in the graph.

    Raises:
        UnsupportedError: the graph is not quantized, or in a way that is not supported.
    """
    expect(captured, Captured, "from_qdq")
    if not any(operator(node).startswith(LIBRARY) for node in captured.module.graph.nodes):
        raise UnsupportedError(
            "model",
            None,
            f"it is not quantized: its graph has no operator {LIBRARY}quantize_per_tensor",
            remedy="quantize a float model with quantize(model, data)",
        )
    module = copy_graph(captured.module)
    run(module, PTQ_PASSES.patterns)
    match_regions(module.graph)
    sites = tuple(_sites(module.graph))
    weights = sum(dequantizes(node) and is_constant(node.args[0]) for node in module.graph.nodes)
    reasons = {node: _reason(node) for node in module.graph.nodes if node.op == "call_function"}
    leaders = {site.name: site.name for site in sites}
    annotations = Annotations(module, sites, (), skipped((), (), reasons), leaders)
    note = f"quantized by another tool: {len(sites)} activations as given, {weights} weights and biases"
    model_info = captured.model_info.with_stage((note,), captured=captured.text(), reference=fx_text(module.graph))
    qparams = {site.name: fixed_qparams(site, site.spec) for site in sites if isinstance(site.spec, Fixed)}
    return Reference(module, captured.signature, qparams, annotations, Parameters({}), model_info)


def _sites(graph: fx.Graph) -> Iterator[Site]:
    """Yield a site for every quantized activation."""
    names, count = ValueNames(graph), dict[str, int]()
    for node in graph.nodes:
        if operator(node) == QUANTIZE_TENSOR and (q := known_type(node).q) is not None:
            value = node.args[0]
            # A value may be quantized more than once.
            number = count[names.of(value)] = count.get(names.of(value), -1) + 1
            name = names.of(value) + (f"@{number}" if number else "")
            spec = Fixed(q.step, q.zero)
            dtype = known_type(node).dtype
            yield Site(name, value.name, Role.ACTIVATION, spec, dtype, q.qmin, q.qmax, None, origin(value), str(dtype))


def _reason(node: fx.Node) -> str:
    """Return the reason why an operator would stay in float."""
    record = record_of(node)
    if record is None:
        return "no int8 kernel for this operator"
    kind = tensor_type(node)
    if kind is None or kind.dtype is not DType.F32:
        return "its result is not a float32 tensor"
    weight = None if record.roles.weight is None else operands(node)[record.roles.weight]
    for unsupported_reason in (
        value for value in (node, weight) if value is not None and info(value).unsupported_reason is not None
    ):
        return str(info(unsupported_reason).unsupported_reason)
    if weight is not None and not dequantizes(weight):
        return "its weight is not quantized"
    if not all(value is not None and dequantizes(value) for value in activations(node)):
        return "it reads a value that is not quantized"
    if any(operator(user) != QUANTIZE_TENSOR for user in node.users):
        return "an operator reads its result in float"
    return "no kernel computes it together with the operators around it"
