"""What annotation finds: chains of operators that run as one kernel, regions, and all that it decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from intaglio.fxgraph.node_info import info, update_info
from intaglio.fxgraph.nodes import activations, call_of, known_record, operands
from intaglio.ops import OpDef
from intaglio.ops.dynamic_quant import ROW_MODES
from intaglio.quant.annotate.embedding_tables import Table, table_notes
from intaglio.quant.annotate.sites import Site, Skip
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.settings import Setting
from intaglio.quant.recipes.user_patterns import QuantizerPattern, Rejected, operands_of_whole, record_at


@dataclass(frozen=True)
class Chain:
    """Operators that run as one kernel, in execution order: anchor first, the value that leaves last."""

    nodes: tuple[fx.Node, ...]

    @property
    def anchor(self) -> fx.Node:
        return self.nodes[0]

    @property
    def root(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def record(self) -> OpDef:
        return record_at(self.nodes)

    def operands(self) -> tuple[fx.Node | None, ...]:
        """Of the record that stands for the whole chain, else of the anchor."""
        whole = info(self.root).composite
        return operands(self.anchor) if whole is None else tuple(operands_of_whole(self.nodes, whole))

    def attrs(self) -> Mapping[str, Any]:
        """As the record binds them."""
        whole = info(self.root).composite
        return self.record.bind(call_of(self.anchor, self.record)) if whole is None else whole.attrs


@dataclass(frozen=True)
class RegionMark:
    """The region that an operator belongs to: its place among those of the graph, the row of `intaglio.fusion.table`
    or the only operator that it is called after, and how many operators it has."""

    index: int
    fusion: str
    size: int


def mark_operators(graph: fx.Graph, regions: Iterable[tuple[str, Sequence[fx.Node]]]) -> None:
    """Write on every operator of a graph the region that it belongs to; marks that are there already go."""
    for node in graph.nodes:
        if info(node).region is not None:
            update_info(node, region=None)
    for index, (name, nodes) in enumerate(regions):
        for node in nodes:
            update_info(node, region=RegionMark(index, name, len(nodes)))


@dataclass(frozen=True)
class Region(Chain):
    """A chain that annotation found: the fusion row or operator it is called after, what the recipe says of it, and the
    user's pattern that it is from."""

    name: str
    setting: Setting
    pattern: QuantizerPattern | None = field(default=None, compare=False)

    @property
    def shares(self) -> bool:
        """Whether the result keeps its input's parameters."""
        return len(self.nodes) == 1 and self.record.shares

    @property
    def moves(self) -> bool:
        """Whether it only puts the levels of one value elsewhere."""
        return len(self.nodes) == 1 and self.record.moves_data and not self.record.variadic

    @property
    def dynamic(self) -> bool:
        """Whether what it reads is quantized while the model runs."""
        return self.setting.activations in ROW_MODES

    @property
    def x_role(self) -> Role:
        """Role of the sites it reads. Recurrent layers have rows only: entries of the batch lie along another axis."""
        mode = self.setting.activations
        if mode is None or not self.dynamic:
            return Role.ACTIVATION
        return Role.TOKEN if self.record.recurrent else Role(mode)

    @property
    def gives_float(self) -> bool:
        """Whether its result is none of levels, whoever reads it."""
        return self.dynamic or self.record.recurrent

    @property
    def adds_shortcut(self) -> bool:
        """Whether it adds a value to an accumulator that the recipe wants in 16 bits."""
        if info(self.root).composite is not None or not self.record.anchor or self.setting.shortcut != 16:
            return False
        return any(known_record(node).adds for node in self.nodes)

    @property
    def matched(self) -> tuple[str, tuple[fx.Node, ...]]:
        """What becomes a kernel: of a layer that is quantized while the model runs, the layer alone."""
        return self.name, self.nodes[:1] if self.dynamic else self.nodes

    def activations(self) -> list[fx.Node]:
        """Values from outside that the region reads as levels, in order, once each."""
        if info(self.root).composite is not None:
            values = self.operands()
            return list(dict.fromkeys(values[i] for i in self.record.roles.x))
        found = []
        for node in self.nodes:
            found += [value for value in activations(node) if value is not None and value not in self.nodes]
        return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Annotations:
    """What `annotate` decided. ``leaders``: site -> the site of its group that has the parameters. ``rejected``: what
    patterns given to the `Quantizer` matched in vain. ``tables``: of embeddings, where the recipe asks for levels.
    ``edges``: (value, reader) by name, where an annotator wants levels outside of regions too; ``outputs``: values that
    everyone reads as levels; ``buffers``: the inputs that are buffers kept as levels -> what they are after a call;
    ``own``: (value, reader, or ``None`` for everyone) -> what makes an observer that writes levels of its own there;
    ``alone``: layers by name whose weights alone have fewer bits, and how."""

    module: fx.GraphModule
    sites: tuple[Site, ...]
    regions: tuple[Region, ...]
    skipped: tuple[Skip, ...]
    leaders: Mapping[str, str]
    rejected: tuple[Rejected, ...] = ()
    tables: tuple[Table, ...] = ()
    edges: frozenset[tuple[str, str]] = frozenset()
    outputs: frozenset[str] = frozenset()
    buffers: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[tuple[str, str | None], Callable[[], Any]] = field(default_factory=dict)
    alone: Mapping[str, Setting] = field(default_factory=dict)

    @property
    def by_value(self) -> dict[tuple[str, Role], Site]:
        return {(site.value, site.role): site for site in self.sites}

    def sites_text(self) -> str:
        """Sites, one line each; biases left out, as one may be added."""
        return "\n".join(str(site) for site in self.sites if site.role != Role.BIAS)

    def text(self) -> str:
        """Sites, then what was skipped, then what patterns matched in vain, one line each."""
        lines = [*map(str, self.sites), *table_notes(self.tables), *(f"skipped {skip}" for skip in self.skipped)]
        return "\n".join(lines + [f"rejected {match}" for match in self.rejected]) + "\n"
