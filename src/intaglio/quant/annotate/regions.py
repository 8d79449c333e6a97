"""Results of annotation: the regions that run as one kernel, and all decisions about what is quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from intaglio.fxgraph.node_info import info, update_info
from intaglio.fxgraph.nodes import activations, call_of, known_record, operands
from intaglio.ops import OpDef
from intaglio.ops.dynamic_quant import ROW_MODES
from intaglio.quant.annotate.embedding_tables import EmbeddingTable, table_notes
from intaglio.quant.annotate.sites import Site, Skip
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.settings import Setting
from intaglio.quant.recipes.user_patterns import QuantizerPattern, Rejected, composite_operands, record_at


@dataclass(frozen=True)
class Chain:
    """Operators that run as one kernel, in execution order: the anchor first, the one that produces the result last."""

    nodes: tuple[fx.Node, ...]

    @property
    def anchor(self) -> fx.Node:
        """Return the first operator, which the chain is built around."""
        return self.nodes[0]

    @property
    def root(self) -> fx.Node:
        """Return the operator that produces the result."""
        return self.nodes[-1]

    @property
    def record(self) -> OpDef:
        """Return the record of the composite operator, or else that of the anchor."""
        return record_at(self.nodes)

    def operands(self) -> tuple[fx.Node | None, ...]:
        """Return the operands of the composite operator that replaces the chain, or else those of the anchor."""
        composite = info(self.root).composite
        return operands(self.anchor) if composite is None else tuple(composite_operands(self.nodes, composite))

    def attrs(self) -> Mapping[str, Any]:
        """Return the attributes of the composite operator, or else those that the record reads from the anchor."""
        composite = info(self.root).composite
        return self.record.bind(call_of(self.anchor, self.record)) if composite is None else composite.attrs


@dataclass(frozen=True)
class RegionMark:
    """The region that an operator belongs to.

    Attributes:
        index: position of the region among those of the graph.
        fusion: name of the row of `intaglio.fusion.table`, or of the only operator in the region.
        size: number of operators in the region.
    """

    index: int
    fusion: str
    size: int


def mark_operators(graph: fx.Graph, regions: Iterable[tuple[str, Sequence[fx.Node]]]) -> None:
    """Store on every operator of a graph the region that it belongs to, and remove the marks of an earlier call."""
    for node in graph.nodes:
        if info(node).region is not None:
            update_info(node, region=None)
    for index, (name, nodes) in enumerate(regions):
        for node in nodes:
            update_info(node, region=RegionMark(index, name, len(nodes)))


@dataclass(frozen=True)
class Region(Chain):
    """A chain of operators that can be quantized together.

    Attributes:
        name: the fusion row or the single operator that it matches.
        setting: the recipe's setting for it.
        pattern: the user's pattern that matched it, if any.
        float_tail: operators behind the chain that its kernel computes in float32, without rounding.
        unrounded: whether its result is a float for readers of floats, even if other readers quantize it.
    """

    name: str
    setting: Setting
    pattern: QuantizerPattern | None = field(default=None, compare=False)
    float_tail: tuple[fx.Node, ...] = ()
    unrounded: bool = False

    @property
    def computed(self) -> tuple[fx.Node, ...]:
        """Return all operators that its kernel computes, those in float32 included."""
        return (*self.nodes, *self.float_tail)

    def returning_float(self) -> Region:
        """Return the region whose operators behind the anchor are computed in float32, from its accumulator.

        A multiplication by a number stays in the chain, because it is folded into the scale of the accumulator.
        """
        size = 1 + sum(known_record(node).multiplies_by_scalar for node in self.nodes[1:])
        name = self.name if size > 1 or len(self.nodes) == 1 else known_record(self.anchor).name
        return replace(self, nodes=self.nodes[:size], name=name, float_tail=self.nodes[size:], unrounded=True)

    def in_graph(self, nodes: Mapping[str, fx.Node]) -> Region:
        """Return the region in another graph, whose nodes are given by name."""
        chain, tail = (tuple(nodes[node.name] for node in part) for part in (self.nodes, self.float_tail))
        return replace(self, nodes=chain, float_tail=tail)

    @property
    def shares_qparams(self) -> bool:
        """Return whether the result has the quantization parameters of the input."""
        return len(self.nodes) == 1 and self.record.shares_qparams

    @property
    def is_data_movement(self) -> bool:
        """Return whether the region is a single data movement of one quantized value."""
        return len(self.nodes) == 1 and self.record.moves_data and not self.record.variadic

    @property
    def dynamic(self) -> bool:
        """Return whether its activations are quantized dynamically, that is while the model runs."""
        return self.setting.activations in ROW_MODES

    @property
    def x_role(self) -> Role:
        """Return the role of the sites that it reads.

        Dynamic recurrent layers are always quantized per token, because their batch may be on another axis than the
        first.
        """
        mode = self.setting.activations
        if mode is None or not self.dynamic:
            return Role.ACTIVATION
        return Role.TOKEN if self.record.recurrent else Role(mode)

    @property
    def returns_float(self) -> bool:
        """Return whether its result is always float: that of a dynamically quantized, recurrent or grouped layer."""
        return self.dynamic or self.record.recurrent or self.record.row_groups

    @property
    def attends(self) -> bool:
        """Return whether it is an operator of attention, which can return floats, and no pattern wants it quantized."""
        always = self.pattern is not None and self.pattern.quantize_always
        return len(self.nodes) == 1 and info(self.root).composite is None and self.record.is_attention and not always

    @property
    def adds_shortcut(self) -> bool:
        """Return whether it adds to an accumulator a value that the recipe wants in 16 bits."""
        if info(self.root).composite is not None or not self.record.anchor or self.setting.shortcut != 16:
            return False
        return any(known_record(node).adds for node in self.nodes)

    @property
    def matched(self) -> tuple[str, tuple[fx.Node, ...]]:
        """Return the name and the operators of the kernel, which is only the anchor if quantization is dynamic."""
        return self.name, self.nodes[:1] if self.dynamic else self.nodes

    def activations(self) -> list[fx.Node]:
        """Return the values from outside that the region reads quantized, in order and without duplicates."""
        if info(self.root).composite is not None:
            values = self.operands()
            return list(dict.fromkeys(values[i] for i in self.record.roles.x))
        found = []
        for node in self.nodes:
            found += [value for value in activations(node) if value is not None and value not in self.nodes]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class DataFloats:
    """Node names of what stays in float because of the calibration data: values for readers of floats, and layers.

    Attributes:
        concatenations: concatenations whose operands have ranges too different for one scale.
        coarse: values that their quantized values represent too coarsely, with signal to noise in decibels.
        layers: first layers whose rounded operand would cost too much in the results, with the signal to noise that
            it would leave in decibels.
    """

    concatenations: frozenset[str] = frozenset()
    coarse: Mapping[str, float] = field(default_factory=dict)
    layers: Mapping[str, float] = field(default_factory=dict)


NO_DATA_FLOATS = DataFloats()
"""Nothing stays in float because of data."""


@dataclass(frozen=True)
class Annotations:
    """All decisions of annotation about one graph.

    Attributes:
        module: the annotated graph.
        sites: the quantization points, in execution order.
        regions: the quantized regions, in execution order.
        skipped: the operators that stay in float, with reasons.
        leaders: site -> the site of its sharing group that holds the parameters.
        rejected: matches of the user's patterns that were not used.
        tables: embedding tables that the recipe wants quantized.
        edges: (value, reader) by name, where an annotator wants quantized values outside of regions too.
        outputs: names of the values that all their readers read quantized.
        buffers: input that holds a quantized buffer -> the buffer's value after a call; cached input that is quantized
            -> the result that later calls receive in its place, or itself.
        custom_observers: (value, reader, or ``None`` for all readers) -> factory of an observer that writes its own
            quantize nodes.
        weight_only: weight-only layers by name, with their settings.
        data_floats: values that stay in float because of the calibration data.
    """

    module: fx.GraphModule
    sites: tuple[Site, ...]
    regions: tuple[Region, ...]
    skipped: tuple[Skip, ...]
    leaders: Mapping[str, str]
    rejected: tuple[Rejected, ...] = ()
    tables: tuple[EmbeddingTable, ...] = ()
    edges: frozenset[tuple[str, str]] = frozenset()
    outputs: frozenset[str] = frozenset()
    buffers: Mapping[str, str] = field(default_factory=dict)
    custom_observers: Mapping[tuple[str, str | None], Callable[[], Any]] = field(default_factory=dict)
    weight_only: Mapping[str, Setting] = field(default_factory=dict)
    data_floats: DataFloats = NO_DATA_FLOATS

    @property
    def by_value(self) -> dict[tuple[str, Role], Site]:
        """Return the sites by node name and role."""
        return {(site.value, site.role): site for site in self.sites}

    def sites_text(self) -> str:
        """Return one line for each site except for biases, because corrections may add biases."""
        return "\n".join(str(site) for site in self.sites if site.role != Role.BIAS)

    def text(self) -> str:
        """Return one line for each site and table, then for each skipped operator and each rejected pattern match."""
        lines = [*map(str, self.sites), *table_notes(self.tables), *(f"skipped {skip}" for skip in self.skipped)]
        return "\n".join(lines + [f"rejected {match}" for match in self.rejected]) + "\n"
