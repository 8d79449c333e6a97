"""The public interface to select quantized values node by node, and how annotations are resolved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import fx

from intaglio.argument_checks import check_arguments, check_fields, check_fields_except, value_text
from intaglio.errors import InputError, UnsupportedError
from intaglio.fxgraph.node_info import origin
from intaglio.fxgraph.nodes import activations, is_constant, known_record, operands, operator, record_of
from intaglio.fxgraph.overloads import EMBEDDING_TARGET
from intaglio.fxgraph.reader_aliases import Place, insert_aliases
from intaglio.ir.disjoint_sets import DisjointSets
from intaglio.quant.annotate.embedding_tables import EMBEDDING_BAG_TARGETS
from intaglio.quant.annotate.int8_buffers import is_destination
from intaglio.quant.annotate.sites import Dynamic, Fixed, Observed, Site
from intaglio.quant.recipes.choices import ActivationMode, Role
from intaglio.quant.recipes.datatypes import DATATYPES
from intaglio.quant.recipes.settings import Setting

ANNOTATION_KEY = "quantization_annotation"
"""Key of the annotation in a node's ``meta``; PyTorch's own quantizers use the same key."""


@check_fields
@dataclass(frozen=True)
class QuantizedAs:
    """Quantization of one value.

    Attributes:
        datatype: name of the datatype, such as "u8".
        spec: source of the parameters.
        span: smallest and largest quantized value, if they are not the datatype's.
        channels: for a weight, use one scale for each output channel instead of one for all.
    """

    datatype: str = "u8"
    spec: Observed | Fixed | Dynamic = field(default_factory=Observed)
    span: tuple[int, int] | None = None
    channels: bool = True

    def __post_init__(self) -> None:
        if self.datatype not in DATATYPES:
            raise UnsupportedError(
                "annotation", None, f"unknown datatype {self.datatype!r}; choose from {', '.join(DATATYPES)}"
            )
        low, high = self.bounds
        if not DATATYPES[self.datatype].qmin <= low < high <= DATATYPES[self.datatype].qmax:
            raise UnsupportedError(
                "annotation",
                None,
                f"the range {low}..{high} is not a part of {self.datatype}, which has "
                f"{DATATYPES[self.datatype].qmin}..{DATATYPES[self.datatype].qmax}",
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """Return the smallest and the largest quantized value."""
        return self.span or (DATATYPES[self.datatype].qmin, DATATYPES[self.datatype].qmax)

    @check_arguments
    def site(self, name: str, node: fx.Node) -> Site:
        """Return the site of an activation that is quantized like this."""
        kind, (low, high) = DATATYPES[self.datatype], self.bounds
        spec: Any = self.spec
        if isinstance(spec, Observed) and not kind.zero_point:
            spec = replace(spec, symmetric=True)
        return Site(name, node.name, Role.ACTIVATION, spec, kind.storage, low, high, None, origin(node), kind.name)


@check_fields
@dataclass(frozen=True)
class SameAs:
    """The parameters of another place.

    Attributes:
        place: a node, or an edge as a pair of nodes, whose annotation has the parameters.
    """

    place: Place


@check_fields
@dataclass(frozen=True)
class CustomObserver:
    """Quantization by an observer that writes its own quantize and dequantize nodes.

    These nodes, and the operators that read them, run in float32 without int8 kernels.

    Attributes:
        observer: function that returns an `nn.Module`, which is called with every value. Its ``convert(module, node)``
            replaces the node that calls it by other operators.
    """

    observer: Callable[[], Any]


@check_fields_except("inputs")
@dataclass
class Annotation:
    """The annotation of one node.

    Attributes:
        inputs: value that the node reads -> how that edge is quantized (``None``: float).
        output: how the result is quantized for all its readers.
        sharing: whether equally quantized edges of this node share parameters with their value and its other readers.
    """

    inputs: dict[fx.Node, QuantizedAs | SameAs | CustomObserver | None] = field(default_factory=dict)
    output: QuantizedAs | SameAs | CustomObserver | None = None
    sharing: bool = True

    def __post_init__(self) -> None:
        allowed = (QuantizedAs, SameAs, CustomObserver, type(None))
        if isinstance(self.inputs, dict) and all(isinstance(one, allowed) for one in self.inputs.values()):
            return
        problem = f"inputs takes a dictionary from nodes to annotations of edges, got {value_text(self.inputs)}"
        raise InputError("Annotation", None, problem, remedy="pass inputs={node.args[0]: QuantizedAs()}")


class Annotator(Protocol):
    """The protocol of an annotator, which `prepare` accepts instead of a `Quantizer`.

    If they exist, ``validate(module)`` and ``specs(sites)``, which returns new specs by site name, are called
    afterwards.
    """

    def annotate(self, module: fx.GraphModule) -> Any:
        """Store annotations with `annotate_node`; the module is a copy, whose graph must not change."""


@check_arguments
def annotate_node(node: fx.Node, annotation: Annotation) -> None:
    """Store an annotation on a node; raise `UnsupportedError` if it already has one.

    Args:
        node: node of the module that is annotated.
        annotation: how its inputs and its result are quantized.
    """
    if ANNOTATION_KEY in node.meta:
        remedy = "annotate a node only if annotation_of(node) is None"
        raise UnsupportedError(node.name, operator(node), "this node is already annotated", remedy=remedy)
    node.meta[ANNOTATION_KEY] = annotation


@check_arguments
def annotation_of(node: fx.Node) -> Annotation | None:
    """Return the annotation of a node, or ``None``.

    Args:
        node: node of the module that is annotated.
    """
    return node.meta.get(ANNOTATION_KEY)


@dataclass(frozen=True)
class ResolvedAnnotations:
    """Annotations resolved to nodes of the module.

    Attributes:
        quantized_as: value -> how it is quantized.
        leaders: value -> the value whose parameters it has.
        edges: (value, reader) pairs that read a quantized value.
        outputs: values that all their readers read quantized.
        weights: layer -> how its weight is quantized.
        dynamic_modes: layer -> "token" or "tensor", if its activation is quantized dynamically.
        tables: embeddings whose table is quantized.
        custom_observers: (value, reader, or ``None`` for all) -> factory of an observer that writes its own
            quantize nodes.
    """

    nodes: frozenset[fx.Node]
    quantized_as: Mapping[fx.Node, QuantizedAs]
    leaders: Mapping[fx.Node, fx.Node]
    edges: frozenset[tuple[fx.Node, fx.Node]]
    outputs: frozenset[fx.Node]
    weights: Mapping[fx.Node, QuantizedAs]
    dynamic_modes: Mapping[fx.Node, str]
    tables: frozenset[fx.Node]
    custom_observers: Mapping[tuple[fx.Node, fx.Node | None], Callable[[], Any]]

    def with_quantized(self, values: Iterable[fx.Node]) -> ResolvedAnnotations:
        """Return a copy in which these values are read quantized by all readers, as u8 unless annotated otherwise."""
        values = list(values)
        new = [value for value in values if value not in self.quantized_as]
        return replace(
            self,
            quantized_as={**self.quantized_as, **dict.fromkeys(new, QuantizedAs())},
            leaders={**self.leaders, **dict(zip(new, new, strict=True))},
            outputs=self.outputs.union(values),
        )

    def setting(self, node: fx.Node, setting: Setting) -> Setting:
        """Return the recipe's setting of a node, overridden by its annotation."""
        alone = self._is_weight_only(node) if node in self.nodes else setting.activations == ActivationMode.FLOAT
        found = replace(
            setting,
            residual="int8",
            functions="precise",
            shortcut=8,
            activations="float" if alone else self.dynamic_modes.get(node, "static"),
        )
        if node in self.weights:
            weight = self.weights[node]
            found = replace(found, weights="channel" if weight.channels else "tensor", weights_dtype=weight.datatype)
        if node in self.tables:
            found = replace(found, embeddings="int8")
        return found

    def _is_weight_only(self, node: fx.Node) -> bool:
        """Return whether the weight of a layer is annotated, but none of its activations."""
        return node in self.weights and not any((value, node) in self.edges for value in activations(node))

    def accepts(self, nodes: Sequence[fx.Node]) -> bool:
        """Return whether a chain reads only quantized values, contains none, and returns what the annotation wants."""
        anchor, root, record = nodes[0], nodes[-1], known_record(nodes[0])
        outside = [(value, node) for node in nodes for value in activations(node) if value not in nodes]
        if not self.nodes.issuperset(nodes) or any(edge not in self.edges for edge in outside):
            return False
        if record.roles.weight is not None and anchor not in self.weights:
            return False
        if any(node in self.quantized_as or (node, None) in self.custom_observers for node in nodes[:-1]):
            return False
        if any((value, node) in self.custom_observers for node in nodes for value in node.all_input_nodes):
            return False
        if record.shares_qparams and len(nodes) == 1:
            return root in self.quantized_as and all(
                self.leaders[root] is self.leaders.get(value) for value, _ in outside
            )
        return root in self.quantized_as or (len(nodes) == 1 and record.anchor and record.accumulates)


def resolve(module: fx.GraphModule, annotations: Mapping[fx.Node, Annotation]) -> ResolvedAnnotations:
    """Resolve annotations of a copy of the graph to the nodes of `module`, or raise `UnsupportedError`.

    A reader whose parameters differ from those of its value gets an ``alias`` node in front, which `convert` removes.
    """
    own = {node.name: node for node in module.graph.nodes}
    annotations = {node: annotation for node, annotation in annotations.items() if node.name in own}
    places = _PlaceGroups()
    dynamic_modes: dict[fx.Node, str] = {}
    weights: dict[fx.Node, QuantizedAs] = {}
    tables: set[fx.Node] = set()
    custom: dict[tuple[fx.Node, fx.Node | None], Callable[[], Any]] = {}
    for seen, annotation in annotations.items():
        reader = own[seen.name]
        for value, quantization in annotation.inputs.items():
            if not isinstance(value, fx.Node):
                raise UnsupportedError(reader.name, operator(reader), f"annotated input {value!r} is not an fx.Node")
            if quantization is None or value.name not in own:
                continue
            if isinstance(quantization, CustomObserver):
                custom[own[value.name], reader] = quantization.observer
                continue
            role = _role(reader, own[value.name])
            if _reads_table(reader, own[value.name]):
                tables.add(reader)
            elif role == Role.WEIGHT and isinstance(quantization, QuantizedAs):
                weights[reader] = quantization
            elif isinstance(quantization, QuantizedAs) and isinstance(quantization.spec, Dynamic):
                dynamic_modes[reader] = quantization.spec.mode
            elif role == Role.ACTIVATION:
                places.add((own[value.name], reader), _translated(quantization, own), annotation.sharing)
        if isinstance(annotation.output, CustomObserver):
            custom[reader, None] = annotation.output.observer
        elif annotation.output is not None:
            places.add(reader, _translated(annotation.output, own), annotation.sharing)
    values, leaders = places.resolved()
    aliases = insert_aliases(module, leaders)
    place_of = {place: aliases.get(place) or (place[0] if isinstance(place, tuple) else place) for place in leaders}
    owner: dict[Place, fx.Node] = {}
    for place, leader in leaders.items():
        owner.setdefault(leader, place_of[place])
    edges = {(place_of[place], place[1]) for place in leaders if isinstance(place, tuple)}
    edges |= {(value, reader) for reader in dynamic_modes for value in activations(reader)[:1]}
    return ResolvedAnnotations(
        nodes=frozenset(own[node.name] for node in annotations),
        quantized_as={place_of[place]: values[leader] for place, leader in leaders.items()},
        leaders={place_of[place]: owner[leader] for place, leader in leaders.items()},
        edges=frozenset(edges),
        outputs=frozenset(place for place in leaders if isinstance(place, fx.Node)),
        weights=weights,
        dynamic_modes=dynamic_modes,
        tables=frozenset(tables),
        custom_observers=custom,
    )


def _reads_table(reader: fx.Node, value: fx.Node) -> bool:
    """Return whether a node looks up rows of a value."""
    return operator(reader) in (EMBEDDING_TARGET, *EMBEDDING_BAG_TARGETS) and value is reader.args[0]


def _role(reader: fx.Node, value: fx.Node) -> Role | None:
    """Return the role of a value for a reader; ``None`` for embedding operands, updated buffers and other constants."""
    if operator(reader) in (EMBEDDING_TARGET, *EMBEDDING_BAG_TARGETS) or is_destination(reader, value):
        return None
    record = record_of(reader)
    if record is not None and record.roles.weight is not None and operands(reader)[record.roles.weight] is value:
        return Role.WEIGHT
    return None if is_constant(value) else Role.ACTIVATION


def _translated(quantization: QuantizedAs | SameAs, own: Mapping[str, fx.Node]) -> QuantizedAs | SameAs:
    """Return the same quantization with its place translated to nodes of the module."""
    if isinstance(quantization, QuantizedAs):
        return quantization
    nodes = quantization.place if isinstance(quantization.place, tuple) else (quantization.place,)
    found = tuple(own[node.name] for node in nodes)
    return SameAs(found if len(found) == 2 else found[0])


class _PlaceGroups:
    """Quantized places, and which of them share parameters."""

    def __init__(self) -> None:
        self.requested: dict[Place, QuantizedAs | SameAs] = {}
        self.separate: set[Place] = set()

    def add(self, place: Place, quantization: QuantizedAs | SameAs, sharing: bool) -> None:
        self.requested[place] = quantization
        if not sharing:
            self.separate.add(place)

    def resolved(self) -> tuple[dict[Place, QuantizedAs], dict[Place, Place]]:
        """Return leader -> quantization, and place -> leader."""
        sharing, by_name = DisjointSets(), {_name(place): place for place in self.requested}
        for place, requested in self.requested.items():
            sharing.find(_name(place))
            if isinstance(requested, SameAs):
                if requested.place not in self.requested:
                    problem = f"it shares the parameters of {_name(requested.place)}, which has no annotation"
                    remedy = f"annotate {_name(requested.place)}, or give this value QuantizedAs instead of SameAs"
                    raise UnsupportedError(_name(place), None, problem, remedy=remedy)
                sharing.join(_name(place), _name(requested.place))
        self._share_values(sharing)
        groups: dict[str, list[Place]] = {}
        for place in self.requested:
            groups.setdefault(sharing.find(_name(place)), []).append(place)
        quantization, leaders = {}, {}
        for group in groups.values():
            specified = {
                place: requested for place in group if isinstance(requested := self.requested[place], QuantizedAs)
            }
            if not specified:
                names = ", ".join(map(_name, group))
                problem = "these values share quantization parameters, but none of them has parameters of its own"
                raise UnsupportedError(names, None, problem, remedy="give one of them QuantizedAs instead of SameAs")
            leader = next(iter(specified))
            quantization[leader] = specified[leader]
            leaders.update(dict.fromkeys(group, leader))
        return quantization, {by_name[_name(place)]: leader for place, leader in leaders.items()}

    def _share_values(self, sharing: DisjointSets) -> None:
        """Join a value and its readers if they are quantized equally, except for places that do not share."""
        specified = {
            sharing.find(_name(p)): requested
            for p, requested in self.requested.items()
            if isinstance(requested, QuantizedAs)
        }
        for place in self.requested:
            if not isinstance(place, tuple) or place in self.separate:
                continue
            for other in self.requested:
                if other == place or place[0] is not (other[0] if isinstance(other, tuple) else other):
                    continue
                a, b = sharing.find(_name(place)), sharing.find(_name(other))
                if a != b and other not in self.separate and specified.get(a) == specified.get(b) is not None:
                    sharing.join(a, b)
                    specified[sharing.find(a)] = specified[a]


def _name(place: Place) -> str:
    return f"{place[0].name} -> {place[1].name}" if isinstance(place, tuple) else place.name
