"""Typed records of intaglio's facts about a torch.fx node and about a graph.

Each record is the one value under `INFO_KEY` in the ``meta`` of its node or module. The other keys of a node belong to
PyTorch: ``val``, ``nn_module_stack``, ``stack_trace``, ``custom``, and ``quantization_annotation`` and `TAG_KEY`, which
quantizers of the export flow write. Records are frozen, so copies of a graph can share them; `update_info` replaces the
record of a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from torch import fx

from intaglio.ir import Dim, Origin, TensorType, evaluate, symbols_of
from intaglio.ops import OpDef

INFO_KEY = "intaglio"
"""Key of the record in ``meta``."""
TAG_KEY = "quantization_tag"
"""Key of ``node.meta`` for a tag of the user or a quantizer. It is copied together with the origin."""


@dataclass(frozen=True)
class LoopIteration:
    """Position of a node in an unrolled loop.

    Attributes:
        loops: pairs of loop name and iteration, outermost first.
        operator: name of the operator in the loop body.
    """

    loops: tuple[tuple[str, int], ...] = ()
    operator: str = ""

    @property
    def position_in_body(self) -> tuple[str, ...]:
        """Return the position in the loop body, which all iterations share."""
        return (*[loop for loop, _ in self.loops], self.operator)

    def __str__(self) -> str:
        return "".join(f"{loop}[{index}]" for loop, index in self.loops)


class LayerPart(NamedTuple):
    """Part of a layer that was split into several layers.

    Attributes:
        layer: name that the layer had, which the sum of all parts has now.
        operator: operator of the layer.
        label: name of the part, different for all nodes of a layer; empty for the sum of all parts.
        exact: whether the parts represent the weight of the layer exactly enough to round each of them to nearest.
    """

    layer: str
    operator: str
    label: str
    exact: bool = False


@dataclass(frozen=True)
class NodeInfo:
    """Facts about a node. A field with its default value does not apply to the node."""

    type: TensorType | None = None
    """Shape and element type of a tensor."""
    dim: Dim | None = None
    """The size that a node with a symbolic integer represents."""
    origin: Origin | None = None
    """Module path, operator as exported and source line."""
    iteration: LoopIteration | None = None
    """Iteration of the unrolled loop that contains the node."""
    event: int | None = None
    """Index of the operator in a recording of the eager frontend."""
    path: str | None = None
    """Dotted name of a constant in the float model."""
    requires_grad: bool | None = None
    """True if a parameter requires a gradient; ``None`` for anything that is not a parameter."""
    buffer: str | None = None
    """Dotted name of the buffer that a graph input carries into a call."""
    record: OpDef | None = None
    """Record of a user-defined operator."""
    composite: Any = None
    """`quant.recipes.user_patterns.CompositeMatch` of the operators that one record represents."""
    rewritten_by: tuple[str, str] | None = None
    """User pattern whose callback wrote the node, and the name of the match's last operator."""
    zero_points: Any = None
    """Zero points per channel of an image input: the node is the byte minus the zero point of its channel."""
    fixed_parameters: tuple[float, int] | None = None
    """Scale and zero point of a value whose quantization is known beforehand."""
    part: LayerPart | None = None
    """Part of a layer in two bytes that the node computes."""
    float_reason: str | None = None
    """Reason why the node stays in float, beside or behind the parts of a layer that reads two bytes."""
    takes_bytes: bool = False
    """True if the image input is passed as uint8."""
    divides_by_smoothing: bool = False
    """True if the node divides a value by smoothing factors; its site has the name of that value."""
    separates_reader: bool = False
    """True if the node only separates a value from a reader with other quantization parameters."""
    site: str | None = None
    """Name of the site whose quantize or dequantize the node is."""
    region: Any = None
    """`quant.annotate.regions.RegionMark` of an operator in an integer region."""
    replaces: str | None = None
    """Name before conversion of the node that this one replaced."""
    observer: Any = None
    """Edge on which a custom observer is called; ``True`` for nodes that the observer wrote."""
    unsupported_reason: str | None = None
    """Reason why no kernel supports the quantized values that the node reads or returns."""
    marks: tuple[Any, ...] = ()
    """Batch norms and dropouts that training applies to the value, in order (`quant.qat.eval_graph`)."""
    folded: tuple[str, ...] = ()
    """Paths of the batch norms that were folded into the layer."""
    imported: Any = None
    """`quant.imported_weights.quantized_weight.QuantizedWeight` that a float constant was dequantized from."""
    int4: bool = False
    """True if a constant of an ONNX model holds 4-bit integers."""


EMPTY_INFO = NodeInfo()


@dataclass(frozen=True)
class GraphInfo:
    """Facts about a whole graph. Copies of the graph share the record."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Size of every dynamic dimension in the example."""
    module_types: Mapping[str, str] = field(default_factory=dict)
    """Qualified class name of every module of the float model, by path."""
    folded: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Names of folded weights and biases, by the constants and the norm they were computed from."""


def graph_info(module: fx.GraphModule) -> GraphInfo:
    """Return the record of a graph, or an empty one."""
    found: GraphInfo = module.meta.get(INFO_KEY) or GraphInfo()
    return found


def update_graph_info(module: fx.GraphModule, **values: Any) -> None:
    """Change fields of a graph's record."""
    module.meta[INFO_KEY] = replace(graph_info(module), **values)


def size_in_example(size: Dim, node: fx.Node) -> int:
    """Return a dimension of a node's graph with dynamic sizes as in the example, and the batch at 1."""
    sizes = graph_info(node.graph.owning_module).sizes
    return evaluate(size, {name: sizes.get(name, 1) for name in symbols_of(size)})


def info(node: fx.Node) -> NodeInfo:
    """Return the record of a node, or an empty one."""
    found: NodeInfo = node.meta.get(INFO_KEY, EMPTY_INFO)
    return found


def set_info(node: fx.Node, **values: Any) -> None:
    """Set a new record with these fields, and drop everything else in the node's ``meta``."""
    node.meta = {INFO_KEY: NodeInfo(**values)}


def update_info(node: fx.Node, **values: Any) -> None:
    """Change fields of a node's record, and keep everything else in its ``meta``."""
    node.meta[INFO_KEY] = replace(info(node), **values)


def copy_info(node: fx.Node, source: fx.Node, **values: Any) -> None:
    """Copy the ``meta`` of another node, and change these fields."""
    node.meta = dict(source.meta)
    update_info(node, **values)


def inherit_info(node: fx.Node, source: fx.Node, **values: Any) -> None:
    """Set a new record with these fields and with the origin, loop iteration and tag of `source`."""
    set_info(node, **values)
    adopt_origin(node, source)


def adopt_origin(node: fx.Node, source: fx.Node) -> None:
    """Copy the origin of another node, and its loop iteration, pattern and tag if it has them."""
    known, own = info(source), info(node)
    update_info(
        node,
        origin=origin(source),
        iteration=known.iteration or own.iteration,
        rewritten_by=known.rewritten_by or own.rewritten_by,
    )
    if TAG_KEY in source.meta:
        node.meta[TAG_KEY] = source.meta[TAG_KEY]


def overlay_info(node: fx.Node, under: fx.Node, **values: Any) -> None:
    """Fill missing fields and keys of a node's ``meta`` from another node, and set these fields."""
    own = {f.name: value for f in fields(NodeInfo) if (value := getattr(info(node), f.name)) != f.default}
    node.meta = {**under.meta, **node.meta}
    node.meta[INFO_KEY] = replace(info(under), **{**own, **values})


def tensor_type(node: fx.Node) -> TensorType | None:
    """Return shape and element type of a node's value; ``None`` for numbers and tuples."""
    return info(node).type


def known_type(node: fx.Node) -> TensorType:
    """Return shape and element type of a node that must be a tensor."""
    kind = info(node).type
    assert kind is not None, f"{node} has no type"
    return kind


def fixed_size(node: fx.Node, axis: int) -> int:
    """Return the size of an axis that must be static."""
    size = known_type(node).shape[axis]
    assert isinstance(size, int), f"axis {axis} of {node} is {size}"
    return size


def origin(node: fx.Node) -> Origin:
    """Return the origin of a node; an empty one if it is unknown."""
    return info(node).origin or Origin()


def constant_path(node: fx.Node, default: str = "") -> str:
    """Return the dotted name of a constant in the float model, or `default` if it is unknown."""
    path = info(node).path
    return default if path is None else path
