"""The public way to say, node by node, which values of a graph become levels: what is written, and what it comes to.

An annotator is given the graph and writes an `Annotation` on each node it has a say on. `resolve` makes of these the
values that carry parameters, the edges that read them, and who shares them with whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from intaglio.errors import UnsupportedError
from intaglio.fxgraph.node_info import info, origin, set_info, tensor_type
from intaglio.fxgraph.nodes import activations, is_constant, known_record, operands, operator, record_of
from intaglio.fxgraph.overloads import EMBEDDING_TARGET
from intaglio.ir import Origin
from intaglio.ir.disjoint_sets import DisjointSets
from intaglio.quant.annotate.embedding_tables import BAGS
from intaglio.quant.annotate.int8_buffers import is_destination
from intaglio.quant.annotate.sites import Dynamic, Fixed, Observed, Site
from intaglio.quant.recipes.choices import ActivationMode, Role
from intaglio.quant.recipes.datatypes import DATATYPES
from intaglio.quant.recipes.settings import Setting

ANNOTATION_KEY = "quantization_annotation"
"""Where a node's ``meta`` has what was written; PyTorch's own quantizers write there too."""
Place: TypeAlias = "fx.Node | tuple[fx.Node, fx.Node]"
"""A value, or an edge: a value and the node that reads it."""


@dataclass(frozen=True)
class Levels:
    """What a value becomes: the name of a datatype (`DATATYPES`) and where its parameters come from.

    ``span``: lowest and highest level, where they are not the datatype's. ``channels``: of a weight, one scale for
    every output channel instead of one for all.
    """

    datatype: str = "u8"
    spec: Observed | Fixed | Dynamic = field(default_factory=Observed)
    span: tuple[int, int] | None = None
    channels: bool = True

    def __post_init__(self) -> None:
        if self.datatype not in DATATYPES:
            raise UnsupportedError(
                "annotation", None, f"no datatype {self.datatype!r}; there are {', '.join(DATATYPES)}"
            )
        low, high = self.bounds
        if not DATATYPES[self.datatype].qmin <= low < high <= DATATYPES[self.datatype].qmax:
            raise UnsupportedError(
                "annotation",
                None,
                f"levels {low}..{high} of {self.datatype}, which has "
                f"{DATATYPES[self.datatype].qmin}..{DATATYPES[self.datatype].qmax}",
            )

    @property
    def bounds(self) -> tuple[int, int]:
        return self.span or (DATATYPES[self.datatype].qmin, DATATYPES[self.datatype].qmax)

    def site(self, name: str, node: fx.Node) -> Site:
        """Of an activation."""
        kind, (low, high) = DATATYPES[self.datatype], self.bounds
        spec: Any = self.spec
        if isinstance(spec, Observed) and not kind.zero_point:
            spec = replace(spec, symmetric=True)
        return Site(name, node.name, Role.ACTIVATION, spec, kind.storage, low, high, None, origin(node), kind.name)


@dataclass(frozen=True)
class SameAs:
    """The parameters of another place, which an annotation gives levels."""

    place: Place


@dataclass(frozen=True)
class Own:
    """Levels that an observer writes itself. ``observer()`` gives an nn.Module that is shown every value; its
    ``convert(module, node)`` puts operators of its choice in place of the node that calls it. No kernel knows them:
    they and what reads them run in float32, as they are written."""

    observer: Callable[[], Any]


@dataclass
class Annotation:
    """Of one node. ``inputs``: value that the node reads -> what that edge carries (``None``: float). ``output``: what
    its result becomes for all who read it. ``sharing``: edges of this node with equal levels have the parameters of the
    value they read, and of its other readers."""

    inputs: dict[fx.Node, Levels | SameAs | Own | None] = field(default_factory=dict)
    output: Levels | SameAs | Own | None = None
    sharing: bool = True


class Annotator(Protocol):
    """What `prepare` takes beside a `Quantizer`. Two methods more are called where there are any:
    ``validate(module)`` afterwards, and ``specs(sites)``, which gives an `Observed` or `Fixed` to put in place of what
    sites have, by name."""

    def annotate(self, module: fx.GraphModule) -> Any:
        """Writes `annotate_node`'s records; the module is a copy, whose graph stays as it is."""


def annotate_node(node: fx.Node, annotation: Annotation) -> None:
    """Writes an annotation; `UnsupportedError` where one is already."""
    if ANNOTATION_KEY in node.meta:
        raise UnsupportedError(
            node.name, operator(node), "it is annotated already", remedy="look at annotation_of(node) first"
        )
    node.meta[ANNOTATION_KEY] = annotation


def annotation_of(node: fx.Node) -> Annotation | None:
    """What has been written on a node."""
    return node.meta.get(ANNOTATION_KEY)


class Composed:
    """Annotators one after another. Who changes or removes what an earlier one wrote is an `UnsupportedError`."""

    def __init__(self, annotators: Iterable[Annotator]) -> None:
        self.annotators = tuple(annotators)

    def annotate(self, module: fx.GraphModule) -> None:
        written: dict[fx.Node, tuple[str, Any, str]] = {}
        for annotator in self.annotators:
            annotator.annotate(module)
            name = type(annotator).__name__
            for node in module.graph.nodes:
                record = node.meta.get(ANNOTATION_KEY)
                if node in written and (record is not written[node][1] or repr(record) != written[node][2]):
                    done = "removed" if record is None else "changed"
                    raise UnsupportedError(
                        node.name,
                        operator(node),
                        f"{name} {done} what {written[node][0]} wrote",
                        remedy="an annotator leaves alone what is annotated",
                    )
                if record is not None and node not in written:
                    written[node] = (name, record, repr(record))

    def validate(self, module: fx.GraphModule) -> None:
        for annotator in self.annotators:
            if hasattr(annotator, "validate"):
                annotator.validate(module)

    def specs(self, sites: Sequence[Site]) -> dict[str, Observed | Fixed]:
        """Of all of them; the later one wins."""
        asked = [annotator.specs(sites) for annotator in self.annotators if hasattr(annotator, "specs")]
        return {name: spec for found in asked for name, spec in found.items()}


@dataclass(frozen=True)
class Written:
    """What annotations come to.

    ``nodes``: those that have one. ``levels``: value -> what it becomes; ``leaders``: value -> the value whose
    parameters it has. ``edges``: (value, reader) that carry levels; ``outputs``: values that all who read them read as
    levels. ``weights``: layer -> what its weight becomes; ``rows``: layer -> "token" or "tensor", where its activation
    becomes levels while the model runs; ``tables``: embeddings whose table becomes levels; ``own``: (value, reader, or
    ``None`` for all) -> what makes the observer that writes levels there.
    """

    nodes: frozenset[fx.Node]
    levels: Mapping[fx.Node, Levels]
    leaders: Mapping[fx.Node, fx.Node]
    edges: frozenset[tuple[fx.Node, fx.Node]]
    outputs: frozenset[fx.Node]
    weights: Mapping[fx.Node, Levels]
    rows: Mapping[fx.Node, str]
    tables: frozenset[fx.Node]
    own: Mapping[tuple[fx.Node, fx.Node | None], Callable[[], Any]]

    def also(self, values: Iterable[fx.Node]) -> Written:
        """With levels of a byte for everyone who reads these values, where nothing else is said of them."""
        values = list(values)
        new = [value for value in values if value not in self.levels]
        return replace(
            self,
            levels={**self.levels, **dict.fromkeys(new, Levels())},
            leaders={**self.leaders, **dict(zip(new, new, strict=True))},
            outputs=self.outputs.union(values),
        )

    def setting(self, node: fx.Node, setting: Setting) -> Setting:
        """A recipe's setting of a node, with what its annotation says of weights and modes in its place."""
        alone = self._weight_alone(node) if node in self.nodes else setting.activations == ActivationMode.FLOAT
        found = replace(
            setting,
            residual="int8",
            functions="precise",
            shortcut=8,
            activations="float" if alone else self.rows.get(node, "static"),
        )
        if node in self.weights:
            weight = self.weights[node]
            found = replace(found, weights="channel" if weight.channels else "tensor", weights_dtype=weight.datatype)
        if node in self.tables:
            found = replace(found, embeddings="int8")
        return found

    def _weight_alone(self, node: fx.Node) -> bool:
        """Whether a layer's weight is annotated and none of its activations."""
        return node in self.weights and not any((value, node) in self.edges for value in activations(node))

    def fits(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether a chain reads levels wherever it reads from outside, has none inside, and gives what is wanted."""
        anchor, root, record = nodes[0], nodes[-1], known_record(nodes[0])
        outside = [(value, node) for node in nodes for value in activations(node) if value not in nodes]
        if not self.nodes.issuperset(nodes) or any(edge not in self.edges for edge in outside):
            return False
        if record.roles.weight is not None and anchor not in self.weights:
            return False
        if any(node in self.levels or (node, None) in self.own for node in nodes[:-1]):
            return False
        if any((value, node) in self.own for node in nodes for value in node.all_input_nodes):
            return False
        if record.shares and len(nodes) == 1:
            return root in self.levels and all(self.leaders[root] is self.leaders.get(value) for value, _ in outside)
        return root in self.levels or (len(nodes) == 1 and record.anchor and record.accumulates)


def resolve(module: fx.GraphModule, written: Mapping[fx.Node, Annotation]) -> Written:
    """What the annotations of a view say of the module it shows. A value whose readers state different parameters gets
    a node ``alias`` in front of those that differ from the rest; `convert` takes it out again.

    `UnsupportedError` for sharing that leads to no place with levels of its own.
    """
    own = {node.name: node for node in module.graph.nodes}
    written = {node: annotation for node, annotation in written.items() if node.name in own}
    places = _Places()
    rows: dict[fx.Node, str] = {}
    weights: dict[fx.Node, Levels] = {}
    tables: set[fx.Node] = set()
    custom: dict[tuple[fx.Node, fx.Node | None], Callable[[], Any]] = {}
    for seen, annotation in written.items():
        reader = own[seen.name]
        for value, levels in annotation.inputs.items():
            if not isinstance(value, fx.Node):
                raise UnsupportedError(reader.name, operator(reader), f"its annotation has {value!r}, which is no node")
            if levels is None or value.name not in own:
                continue
            if isinstance(levels, Own):
                custom[own[value.name], reader] = levels.observer
                continue
            role = _role(reader, own[value.name])
            if _reads_table(reader, own[value.name]):
                tables.add(reader)
            elif role == Role.WEIGHT and isinstance(levels, Levels):
                weights[reader] = levels
            elif isinstance(levels, Levels) and isinstance(levels.spec, Dynamic):
                rows[reader] = levels.spec.mode
            elif role == Role.ACTIVATION:
                places.add((own[value.name], reader), _own(levels, own), annotation.sharing)
        if isinstance(annotation.output, Own):
            custom[reader, None] = annotation.output.observer
        elif annotation.output is not None:
            places.add(reader, _own(annotation.output, own), annotation.sharing)
    values, leaders = places.settled()
    aliases = _apart(module, leaders)
    held = {place: aliases.get(place) or (place[0] if isinstance(place, tuple) else place) for place in leaders}
    owner: dict[Place, fx.Node] = {}
    for place, leader in leaders.items():
        owner.setdefault(leader, held[place])
    edges = {(held[place], place[1]) for place in leaders if isinstance(place, tuple)}
    edges |= {(value, reader) for reader in rows for value in activations(reader)[:1]}
    return Written(
        nodes=frozenset(own[node.name] for node in written),
        levels={held[place]: values[leader] for place, leader in leaders.items()},
        leaders={held[place]: owner[leader] for place, leader in leaders.items()},
        edges=frozenset(edges),
        outputs=frozenset(place for place in leaders if isinstance(place, fx.Node)),
        weights=weights,
        rows=rows,
        tables=frozenset(tables),
        own=custom,
    )


def _reads_table(reader: fx.Node, value: fx.Node) -> bool:
    """Return whether a node looks up rows of a value."""
    return operator(reader) in (EMBEDDING_TARGET, *BAGS) and value is reader.args[0]


def _role(reader: fx.Node, value: fx.Node) -> Role | None:
    """Return what a value is to a node that reads it; ``None`` for all operands of embeddings, for buffers that are
    written into, and for constants that are no weight."""
    if operator(reader) in (EMBEDDING_TARGET, *BAGS) or is_destination(reader, value):
        return None
    record = record_of(reader)
    if record is not None and record.roles.weight is not None and operands(reader)[record.roles.weight] is value:
        return Role.WEIGHT
    return None if is_constant(value) else Role.ACTIVATION


def _own(levels: Levels | SameAs, own: Mapping[str, fx.Node]) -> Levels | SameAs:
    """With places of the module instead of the view."""
    if isinstance(levels, Levels):
        return levels
    nodes = levels.place if isinstance(levels.place, tuple) else (levels.place,)
    found = tuple(own[node.name] for node in nodes)
    return SameAs(found if len(found) == 2 else found[0])


class _Places:
    """Places that carry levels, and who shares with whom."""

    def __init__(self) -> None:
        self.said: dict[Place, Levels | SameAs] = {}
        self.alone: set[Place] = set()

    def add(self, place: Place, levels: Levels | SameAs, sharing: bool) -> None:
        self.said[place] = levels
        if not sharing:
            self.alone.add(place)

    def settled(self) -> tuple[dict[Place, Levels], dict[Place, Place]]:
        """Leader -> levels, place -> leader."""
        sharing, by_name = DisjointSets(), {_name(place): place for place in self.said}
        for place, said in self.said.items():
            sharing.find(_name(place))
            if isinstance(said, SameAs):
                if said.place not in self.said:
                    problem = f"shares the parameters of {_name(said.place)}, which no annotation gives any"
                    raise UnsupportedError(_name(place), None, problem)
                sharing.join(_name(place), _name(said.place))
        self._share_values(sharing)
        groups: dict[str, list[Place]] = {}
        for place in self.said:
            groups.setdefault(sharing.find(_name(place)), []).append(place)
        levels, leaders = {}, {}
        for group in groups.values():
            stated = {place: said for place in group if isinstance(said := self.said[place], Levels)}
            if not stated:
                names = ", ".join(map(_name, group))
                raise UnsupportedError(names, None, "these share parameters and none of them has any")
            leader = next(iter(stated))
            levels[leader] = stated[leader]
            leaders.update(dict.fromkeys(group, leader))
        return levels, {by_name[_name(place)]: leader for place, leader in leaders.items()}

    def _share_values(self, sharing: DisjointSets) -> None:
        """A value and its readers share where what they come to state is equal, unless one is to have its own."""
        stated = {sharing.find(_name(p)): said for p, said in self.said.items() if isinstance(said, Levels)}
        for place in self.said:
            if not isinstance(place, tuple) or place in self.alone:
                continue
            for other in self.said:
                if other == place or place[0] is not (other[0] if isinstance(other, tuple) else other):
                    continue
                a, b = sharing.find(_name(place)), sharing.find(_name(other))
                if a != b and other not in self.alone and stated.get(a) == stated.get(b) is not None:
                    sharing.join(a, b)
                    stated[sharing.find(a)] = stated[a]


def _name(place: Place) -> str:
    return f"{place[0].name} -> {place[1].name}" if isinstance(place, tuple) else place.name


def _apart(module: fx.GraphModule, leaders: Mapping[Place, Place]) -> dict[Place, fx.Node]:
    """Edges whose parameters are not those of their value -> the node in between."""
    found: dict[Place, fx.Node] = {}
    made: dict[tuple[fx.Node, Place], fx.Node] = {}
    main: dict[fx.Node, Place] = {place: leader for place, leader in leaders.items() if isinstance(place, fx.Node)}
    for place, leader in leaders.items():
        if not isinstance(place, tuple) or main.setdefault(place[0], leader) == leader:
            continue
        value, reader = place
        before = next((node for node in reader.all_input_nodes if is_apart(node) and node.args[0] is value), None)
        if before is not None:
            made[value, leader] = before
        if (value, leader) not in made:
            with module.graph.inserting_after(value):
                alias = module.graph.call_function(torch.ops.aten.alias.default, (value,))
            where = origin(value)
            alias_origin = Origin(where.path, "aten.alias.default", where.source)
            set_info(alias, type=tensor_type(value), stands_between=True, origin=alias_origin)
            made[value, leader] = alias
        found[place] = made[value, leader]
        reader.replace_input_with(value, found[place])
    return found


def is_apart(node: fx.Node) -> bool:
    """Whether a node only stands between a value and a reader with parameters of its own."""
    return info(node).stands_between
