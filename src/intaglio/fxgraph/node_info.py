"""`NodeInfo` and `GraphInfo`: typed records of what intaglio knows about a torch.fx node, and about a graph.

Each is the one value under `INFO` in the ``meta`` of its node or module. The other keys of a node are torch's:
``val``, ``nn_module_stack``, ``stack_trace``, ``custom``, and ``quantization_annotation`` and `TAG`, which quantizers
of the export flow write. The records are frozen: copies of a graph share them, and `update_info` gives a node a record
of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import fx

from intaglio.ir import Dim, Origin, TensorType, evaluate, symbols_of
from intaglio.ops import OpDef

INFO = "intaglio"
"""Key of the record in ``meta``."""
TAG = "quantization_tag"
"""Key of ``node.meta`` that holds whatever a user or a quantizer wrote there. It goes along with the origin."""


@dataclass(frozen=True)
class Turn:
    """Which operator of a loop's body a node is, and in which iteration: loops and iterations outermost first."""

    loops: tuple[tuple[str, int], ...] = ()
    operator: str = ""

    @property
    def place(self) -> tuple[str, ...]:
        """The same for all iterations."""
        return (*[loop for loop, _ in self.loops], self.operator)

    def __str__(self) -> str:
        return "".join(f"{loop}[{index}]" for loop, index in self.loops)


@dataclass(frozen=True)
class NodeInfo:
    """``None`` (for flags: ``False``) says that a node has nothing of the kind."""

    type: TensorType | None = None
    """Shape and element type of a tensor."""
    dim: Dim | None = None
    """The size that a node of a symbolic number stands for."""
    origin: Origin | None = None
    """Module path, operator as exported and source line."""
    turn: Turn | None = None
    """The iteration of an unrolled loop that the node belongs to."""
    event: int | None = None
    """Index of the operator in a recording of the eager door."""
    path: str | None = None
    """Dotted name of a constant in the float model."""
    trained: bool | None = None
    """Whether a parameter requires a gradient; ``None`` for what is no parameter."""
    buffer: str | None = None
    """Dotted name of the buffer that a graph input carries into a call."""
    record: OpDef | None = None
    """A user's own operator record."""
    composite: Any = None
    """`quant.recipes.user_patterns.Whole` of the operators that one record stands for together."""
    zero_points: Any = None
    """Zero points per channel of pixels: the node is the pixels less these."""
    takes_bytes: bool = False
    """Whether the pixels come as bytes."""
    smooths: bool = False
    """Whether the node divides a value by smoothing factors, in whose name it then stands."""
    stands_between: bool = False
    """Whether the node only separates a value from a reader with parameters of its own."""
    site: str | None = None
    """The quantization point whose quantize or dequantize the node is."""
    region: Any = None
    """`quant.annotate.regions.RegionMark` of an operator that runs, or is to run, on integers."""
    replaces: str | None = None
    """Name before conversion of the node that this one replaced."""
    observer: Any = None
    """Edge that a user's own observer is called on; ``True`` for nodes that it wrote."""
    unfit: str | None = None
    """Why no kernel has the quantized values that the node reads or makes."""
    marks: tuple[Any, ...] = ()
    """What training does to the value, in order (`quant.qat.eval_graph`)."""
    int4: bool = False
    """Whether a constant of an ONNX model holds 4-bit integers."""


NOTHING = NodeInfo()


@dataclass(frozen=True)
class GraphInfo:
    """Facts about a graph as a whole. Copies of the graph have the same record."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """Size in the example of every free dimension."""
    module_types: Mapping[str, str] = field(default_factory=dict)
    """Qualified name of the class of every module of the float model, by path."""
    folded: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Names of the weight and the bias that a batch norm was folded into, by what they were made of."""


def graph_info(module: fx.GraphModule) -> GraphInfo:
    """Return the record of a graph; an empty one when it has none."""
    found: GraphInfo = module.meta.get(INFO) or GraphInfo()
    return found


def update_graph_info(module: fx.GraphModule, **values: Any) -> None:
    """Change fields of a graph's record."""
    module.meta[INFO] = replace(graph_info(module), **values)


def size_in_example(size: Dim, node: fx.Node) -> int:
    """Return a dimension of a node's graph at batch 1 and, where others are free, at their size in the example."""
    sizes = graph_info(node.graph.owning_module).sizes
    return evaluate(size, {name: sizes.get(name, 1) for name in symbols_of(size)})


def info(node: fx.Node) -> NodeInfo:
    """Return the record of a node; an empty one when it has none."""
    found: NodeInfo = node.meta.get(INFO, NOTHING)
    return found


def set_info(node: fx.Node, **values: Any) -> None:
    """Give a node a record with these fields, and drop everything else in its ``meta``."""
    node.meta = {INFO: NodeInfo(**values)}


def update_info(node: fx.Node, **values: Any) -> None:
    """Change fields of a node's record, and keep everything else in its ``meta``."""
    node.meta[INFO] = replace(info(node), **values)


def copy_info(node: fx.Node, source: fx.Node, **values: Any) -> None:
    """Give a node the ``meta`` of another one, with these fields changed."""
    node.meta = dict(source.meta)
    update_info(node, **values)


def inherit_info(node: fx.Node, source: fx.Node, **values: Any) -> None:
    """Describe a node that is made for another: it has these fields and the other's origin, loop iteration and tag."""
    set_info(node, **values)
    adopt_origin(node, source)


def adopt_origin(node: fx.Node, source: fx.Node) -> None:
    """Give a node the origin of another one, and its loop iteration and tag where it has them."""
    update_info(node, origin=origin(source), turn=info(source).turn or info(node).turn)
    if TAG in source.meta:
        node.meta[TAG] = source.meta[TAG]


def overlay_info(node: fx.Node, under: fx.Node, **values: Any) -> None:
    """Complete the ``meta`` of a node by that of another one, and set these fields."""
    own = {f.name: value for f in fields(NodeInfo) if (value := getattr(info(node), f.name)) != f.default}
    node.meta = {**under.meta, **node.meta}
    node.meta[INFO] = replace(info(under), **{**own, **values})


def tensor_type(node: fx.Node) -> TensorType | None:
    """Return shape and element type of a node's value; ``None`` for numbers and tuples."""
    return info(node).type


def known_type(node: fx.Node) -> TensorType:
    """Return shape and element type of a node that certainly makes a tensor."""
    kind = info(node).type
    assert kind is not None, f"{node} has no type"
    return kind


def fixed_size(node: fx.Node, axis: int) -> int:
    """Return the size of an axis that is a number in every call."""
    size = known_type(node).shape[axis]
    assert isinstance(size, int), f"axis {axis} of {node} is {size}"
    return size


def origin(node: fx.Node) -> Origin:
    """Return where a node comes from; an empty origin when that is not known."""
    return info(node).origin or Origin()


def constant_path(node: fx.Node, default: str = "") -> str:
    """Return the dotted name of a constant in the float model, or the default when it has none."""
    path = info(node).path
    return default if path is None else path
