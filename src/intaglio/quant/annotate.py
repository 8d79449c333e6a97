"""Which values become integers: fusion rows over the prepared graph, sites on values, reasons for the rest."""

from __future__ import annotations

import operator as python_operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from intaglio import numerics
from intaglio.capture.canonical import COPIES
from intaglio.capture.nodes import (
    FxView,
    activations,
    arguments,
    call_of,
    is_constant,
    operands,
    operator,
    origin,
    record_of,
    tensor_type,
)
from intaglio.errors import UnsupportedError
from intaglio.ir import DType, evaluate, numel, symbols_of
from intaglio.ir.moves import MOVES
from intaglio.ir.rewrite import match
from intaglio.ops import ACCUMULATING, FUSIONS, NUMBERS, SUMS, OpDef
from intaglio.ops.activate import FUNCTIONS
from intaglio.ops.conv import output_axis
from intaglio.ops.recurrent import RECURRENT
from intaglio.ops.rows import ROW_MODES
from intaglio.quant.annotation import Annotator, Written, is_apart, resolve
from intaglio.quant.dynamic import row_sites, unable_at_run_time
from intaglio.quant.embeddings import BAGS, Table, bag_refusal, find_tables, table_notes
from intaglio.quant.foreign import annotations_of, torch_view
from intaglio.quant.passes import BATCH_NORM
from intaglio.quant.patterns import (
    Found,
    QuantizerPattern,
    Rejected,
    find,
    is_host,
    name_operators,
    operands_of_whole,
    patterns_of,
    record_at,
    whole_of,
)
from intaglio.quant.recipe import Quantizer, Recipe, Setting
from intaglio.quant.recurrent import (
    RECURRENT_CALL,
    ZEROS,
    is_recurrent,
    recurrent_macs,
    recurrent_refusal,
    weight_sites,
)
from intaglio.quant.sites import Derived, Fixed, Observed, Shared, Site, Skip, groups
from intaglio.quant.weights import group_of


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
        whole = self.root.meta.get("whole")
        return operands(self.anchor) if whole is None else tuple(operands_of_whole(self.nodes, whole))

    def attrs(self) -> Mapping[str, Any]:
        """As the record binds them."""
        whole = self.root.meta.get("whole")
        return self.record.bind(call_of(self.anchor, self.record)) if whole is None else whole.attrs


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
        return len(self.nodes) == 1 and self.record.name in MOVES and not self.record.variadic

    @property
    def dynamic(self) -> bool:
        """Whether what it reads is quantized while the model runs."""
        return self.setting.activations in ROW_MODES

    @property
    def x_role(self) -> str:
        """Role of the sites it reads. Recurrent layers have rows only: entries of the batch lie along another axis."""
        if not self.dynamic:
            return "activation"
        return "token" if self.record.name in RECURRENT else self.setting.activations

    @property
    def gives_float(self) -> bool:
        """Whether its result is none of levels, whoever reads it."""
        return self.dynamic or self.record.name in RECURRENT

    @property
    def adds_shortcut(self) -> bool:
        """Whether it adds a value to an accumulator that the recipe wants in 16 bits."""
        if "whole" in self.root.meta or not self.record.anchor or self.setting.shortcut != 16:
            return False
        return any(record_of(node).name in SUMS for node in self.nodes)

    def activations(self) -> list[fx.Node]:
        """Values from outside that the region reads as levels, in order, once each."""
        if "whole" in self.root.meta:
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
    everyone reads as levels."""

    module: fx.GraphModule
    sites: tuple[Site, ...]
    regions: tuple[Region, ...]
    skipped: tuple[Skip, ...]
    leaders: Mapping[str, str]
    rejected: tuple[Rejected, ...] = ()
    tables: tuple[Table, ...] = ()
    edges: frozenset[tuple[str, str]] = frozenset()
    outputs: frozenset[str] = frozenset()

    @property
    def by_value(self) -> dict[tuple[str, str], Site]:
        return {(site.value, site.role): site for site in self.sites}

    def sites_text(self) -> str:
        """Sites, one line each; biases left out, as one may be added."""
        return "\n".join(str(site) for site in self.sites if site.role != "bias")

    def text(self) -> str:
        """Sites, then what was skipped, then what patterns matched in vain, one line each."""
        lines = [*map(str, self.sites), *table_notes(self.tables), *(f"skipped {skip}" for skip in self.skipped)]
        return "\n".join(lines + [f"rejected {match}" for match in self.rejected]) + "\n"


def annotate_graph(module: fx.GraphModule, quantizer: Quantizer, classes: Mapping[str, str]) -> Annotations:
    """Sites and skips of a graph that the PTQ passes have been over."""
    recipe, graph = quantizer.recipe, module.graph
    name_operators(graph, quantizer.operators)
    written = None if quantizer.annotator is None else _written(module, quantizer.annotator)
    computing = [node for node in graph.nodes if node.op == "call_function" and not _is_aside(node)]
    recipe.check((origin(node) for node in computing), classes)
    settings = {node: recipe.setting(origin(node), classes) for node in computing}
    if written is not None:
        settings = {node: written.setting(node, setting) for node, setting in settings.items()}
    reasons = {node: refusal(node, settings[node]) for node in computing}
    rejected: list[Rejected] = []
    matches: dict[fx.Node, Found] | None = None
    if quantizer.patterns:
        won, rejected = find(graph, patterns_of(quantizer.patterns), reasons)
        matches = {node: found for found in won for node in found.nodes}
        _follow(matches, recipe, classes, settings, reasons)
    if written is not None:
        return _annotated(module, quantizer.annotator, written, settings, reasons)
    regions = _active(graph, settings, reasons, matches)
    if quantizer.skip_first or quantizer.skip_last:
        reasons.update(_ends(graph, regions, quantizer))
        regions = _active(graph, settings, reasons, matches)
    returned = _returned(graph) if quantizer.integers else {}
    sites = _sites(graph, regions, {node: recipe.setting(origin(node), classes) for node in returned})
    tables = find_tables(settings)
    skipped, outputs = _skipped(regions, tables, reasons), frozenset(node.name for node in returned)
    return Annotations(module, sites, regions, skipped, groups(sites), tuple(rejected), tables, outputs=outputs)


def _returned(graph: fx.Graph) -> dict[fx.Node, None]:
    """Float32 results that operators make."""
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    made = [node for node in results if node.op == "call_function" and operator(node) not in COPIES]
    kinds = {node: tensor_type(node) for node in made}
    return {node: None for node, kind in kinds.items() if kind is not None and kind.dtype is DType.F32}


def _is_aside(node: fx.Node) -> bool:
    """Whether a node only holds a place: of pixels less their zero points, of a reader with parameters of its own."""
    return "zero_points" in node.meta or is_apart(node)


def _written(module: fx.GraphModule, annotator: Annotator) -> Written:
    view = torch_view(module)
    return resolve(module, annotations_of(view, annotator))


def _annotated(
    module: fx.GraphModule, annotator: Annotator, written: Written, settings: Mapping[fx.Node, Setting],
    reasons: dict[fx.Node, str | None],
) -> Annotations:  # fmt: skip
    """What an annotator said. Regions lie where fusion rows and operators fit between the values it wants as levels;
    around all else that it annotated levels are made and taken back."""
    for node in settings:
        if reasons[node] is None and node not in written.nodes:
            reasons[node] = "no annotation"
    regions = tuple(_regions(module.graph, settings, reasons, None, written))
    sites = _replaced(_annotated_sites(module.graph, regions, written), annotator)
    tables = find_tables({node: setting for node, setting in settings.items() if node in written.tables})
    inside = {node for region in regions for node in region.nodes}
    for node in settings:
        if reasons[node] is None and node not in inside:
            reasons[node] = "levels are not wanted where a kernel reads or gives them"
    edges = frozenset((value.name, reader.name) for value, reader in written.edges if reader not in written.rows)
    outputs = frozenset(node.name for node in written.outputs)
    return Annotations(module, sites, regions, _skipped(regions, tables, reasons), groups(sites), (), tables, edges,
                       outputs)  # fmt: skip


def _skipped(
    regions: Iterable[Region], tables: Iterable[Table], reasons: Mapping[fx.Node, str | None]
) -> tuple[Skip, ...]:
    taken = {node for region in regions for node in region.nodes}
    taken |= {table.node for table in tables if table.reason is None}
    return tuple(_skip(node, reason) for node, reason in reasons.items() if node not in taken and _counts(node))


def _replaced(sites: tuple[Site, ...], annotator: Annotator) -> tuple[Site, ...]:
    """With the specs that an annotator puts in place of those it asked for."""
    if not hasattr(annotator, "specs"):
        return sites
    found = annotator.specs(sites)
    known = {site.name for site in sites if isinstance(site.spec, (Observed, Fixed))}
    if unknown := sorted(set(found) - known):
        raise UnsupportedError(unknown[0], None, "specs() names it, and no site called that has parameters of its own",
                               remedy="sites that share parameters follow the one they name")  # fmt: skip
    return tuple(replace(site, spec=found.get(site.name, site.spec)) for site in sites)


def _follow(
    matches: Mapping[fx.Node, Found], recipe: Recipe, classes: Mapping[str, str], settings: dict[fx.Node, Setting],
    reasons: dict[fx.Node, str | None],
) -> None:  # fmt: skip
    """Settings and reasons as the patterns say. Operators that only select or clamp values need no pattern: they go
    along with what they follow."""
    for node in settings:
        found = matches.get(node)
        if found is None:
            if reasons[node] is None and not record_of(node).shares:
                reasons[node] = "no pattern takes it"
            continue
        if found.pattern.setting is not None:
            own = replace(recipe, default=found.pattern.setting.over(recipe.default))
            settings[node] = own.setting(origin(node), classes)
        reasons[node] = None if settings[node].quantize else f"the pattern {found.pattern.name} leaves it in float"


def _active(
    graph: fx.Graph, settings: Mapping[fx.Node, Setting], reasons: Mapping[fx.Node, str | None],
    matches: Mapping[fx.Node, Found] | None,
) -> tuple[Region, ...]:  # fmt: skip
    """The regions that are quantized, in execution order."""
    found = _regions(graph, settings, reasons, matches)
    active = _spread(found)
    return tuple(region for region in found if region in active)


def _ends(graph: fx.Graph, regions: Iterable[Region], quantizer: Quantizer) -> dict[fx.Node, str]:
    """Operators of the first and last regions, and why they stay in float. Regions that only select or clamp values do
    not count: nothing is computed in them."""
    counted = [region for region in regions if not all(record_of(node).shares for node in region.nodes)]
    inside = {node for region in counted for node in region.nodes}
    before: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or (node not in inside and before.intersection(node.all_input_nodes)):
            before.add(node)
    behind: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or (node not in inside and behind.intersection(node.users)):
            behind.add(node)
    reasons: dict[fx.Node, str] = {}
    for region in counted:
        if quantizer.skip_first and any(before.intersection(node.all_input_nodes) for node in region.nodes):
            reasons.update(dict.fromkeys(region.nodes, "skip_first: nothing quantized comes before it"))
        elif quantizer.skip_last and behind.intersection(region.root.users):
            reasons.update(dict.fromkeys(region.nodes, "skip_last: nothing quantized comes after it"))
    return reasons


def match_notes(annotations: Annotations) -> tuple[str, ...]:
    """How often each pattern took something, for reports; nothing where there are no patterns."""
    counts = Counter(region.pattern.name for region in annotations.regions if region.pattern is not None)
    vain = len(annotations.rejected)
    if not counts and not vain:
        return ()
    found = ", ".join(f"{name} x {count}" for name, count in sorted(counts.items())) or "none"
    lost = f"; {vain} match{'es' * (vain != 1)} rejected, the sites' text says why" if vain else ""
    return (f"patterns: {found}{lost}",)


def reads_shortcut(region: Region, node: fx.Node, value: fx.Node, shortcuts: Mapping[fx.Node, str | None]) -> bool:
    """Whether an operator of a region takes 16 bits of a value: a sum behind an anchor whose recipe says so, or a move
    whose result has them."""
    if value not in shortcuts or shortcuts[value] is not None:
        return False
    return region.root in shortcuts if region.moves else region.adds_shortcut and node is not region.anchor


def find_shortcuts(regions: Iterable[Region]) -> dict[fx.Node, str | None]:
    """Every value that a sum wants in 16 bits, and those it is moved from, with the reason it has 8 (or ``None``)."""
    regions = list(regions)
    produced = {region.root: region for region in regions}
    found: dict[fx.Node, str | None] = {}

    def want(value: fx.Node) -> str | None:
        region = produced.get(value)
        if region is None:
            reason = "no quantized operator makes it"
        elif region.moves:
            reason = want(region.activations()[0])
        elif region.setting.activation.storage is not DType.U8:
            reason = f"its levels are {region.setting.activation.name}"
        else:
            reason = None if region.record.anchor and region.name not in PRECISE_ROWS else f"{region.name} makes it"
        found[value] = reason
        return reason

    for region in regions:
        if region.adds_shortcut:
            for value in (v for node in region.nodes[1:] for v in activations(node)):
                if value is not None and value not in region.nodes and value not in found:
                    want(value)
    return found


PRECISE_ROWS = frozenset(row.name for row in FUSIONS if row.precise)


def notes_of(regions: Iterable[Region]) -> tuple[str, ...]:
    """Which functions are computed precisely, which weights have few bits, and which shortcuts 8 although 16 were asked
    for; nothing where none are."""
    regions = list(regions)
    counts = Counter(record_of(region.root).name for region in regions if region.name in PRECISE_ROWS)
    found = ", ".join(f"{name} x {count}" for name, count in sorted(counts.items()))
    notes = [f"precise functions: {found}; all others are tables of 256 levels"] if found else []
    settings = [region.setting for region in regions if region.record.roles.weight is not None]
    packed = Counter(str(packing) for setting in settings if (packing := setting.weight.packing(setting.group)))
    found = ", ".join(f"{kind} x {count}" for kind, count in sorted(packed.items()))
    notes += [f"weights: {found}; so they are in files, and kernels compute with them as int8"] if found else []
    moved = {region.root for region in regions if region.moves}
    short = {node: reason for node, reason in find_shortcuts(regions).items() if reason and node not in moved}
    notes += [f"shortcut {origin(node).path or node.name}: 8 bits, as {reason}" for node, reason in short.items()]
    return tuple(notes)


FLOATS = "the recipe leaves activations in float"


def refusal(node: fx.Node, setting: Setting) -> str | None:
    """Why an operator stays in float under a setting; ``None`` when it need not."""
    record = record_of(node)
    if operator(node) == BATCH_NORM:
        return f"{LOOSE_NORM}, and whose parameters are computed"
    if operator(node) in BAGS:
        return bag_refusal(node) or "its table is of floats"
    if record is None:
        return "no int8 kernel for this operator"
    if record.name in RECURRENT and setting.quantize:
        return recurrent_refusal(node, setting)
    if tensor_type(node) is None or tensor_type(node).dtype is not DType.F32:
        kind = tensor_type(node)
        return "not a float32 tensor" + ("" if kind is None else f" but {kind.dtype}")
    if not setting.quantize:
        return "the recipe leaves it in float"
    if setting.activations in ROW_MODES and (reason := unable_at_run_time(record, setting)) is not None:
        return reason
    if setting.activations == "float":
        own = record.roles.weight is not None
        return f"{setting.weight.name} weights alone: its activations stay in float" if own else FLOATS
    if setting.residual == "float" and not (record.anchor or record.shares or record.name in (*FUNCTIONS, "affine")):
        return "the recipe leaves what is between products in float"
    values = activations(node)
    if any(value is not None and is_constant(value) for value in values):
        return "an operand is a constant"
    if not values or values[0] is None:
        return "its operand is not a tensor"
    if is_host(record):
        others = [value for i, value in enumerate(operands(node)) if i not in record.roles.x and value is not None]
        if None in values or any(not is_constant(value) for value in others):
            return "an operand that is no constant, and none of the operator's activations"
        if any("zero_points" in value.meta for value in values):
            return "it reads the image, whose channels have parameters of their own"
    return record.check(call_of(node, record))


def _regions(
    graph: fx.Graph, settings: Mapping[fx.Node, Setting], reasons: Mapping[fx.Node, str | None],
    matches: Mapping[fx.Node, Found] | None, written: Written | None = None,
) -> list[Region]:  # fmt: skip
    """Every fusion row where it fits, longest first, then single operators; in execution order. With patterns, only
    inside one match; what has a meaning of its own is one region. With annotations, where they allow it."""
    view, owners = FxView(graph), matches or {}
    nodes = [node for node in settings if reasons[node] is None]
    found = [_whole_region(one, settings) for one in dict.fromkeys(owners.values()) if _is_whole(one, reasons)]
    taken = {node for region in found for node in region.nodes}
    for row in FUSIONS:
        for node in nodes:
            hit = match(row.pattern, node, view) if node not in taken else None
            if hit is None or taken.intersection(hit.nodes) or not fusable(hit.nodes):
                continue
            if any(reasons[n] is not None for n in hit.nodes) or not _of_one_match(hit.nodes, matches):
                continue
            if row.precise and settings[node].functions != "precise":
                continue
            chain = tuple(sorted(hit.nodes, key=view.position))
            if _alike(chain, settings) if written is None else written.fits(chain):
                setting = settings[node if written is None else chain[0]]
                found.append(Region(chain, row.name, setting, _pattern_of(chain, owners)))
                taken.update(chain)
    found += [
        Region((node,), record_of(node).name, settings[node], _pattern_of((node,), owners))
        for node in nodes
        if node not in taken and (written.fits((node,)) if written else not _behind_only(node, settings[node]))
    ]
    return sorted(found, key=lambda region: view.position(region.root))


def _alike(nodes: Iterable[fx.Node], settings: Mapping[fx.Node, Setting]) -> bool:
    """Whether one setting holds for a chain, in what concerns all of it."""
    return len({replace(settings[node], functions=None, shortcut=None, residual=None) for node in nodes}) == 1


def _behind_only(node: fx.Node, setting: Setting) -> bool:
    """Whether the recipe wants a function, or factors, in float wherever they are not right behind a product."""
    return setting.residual == "float" and record_of(node).name in (*FUNCTIONS, "affine")


def _is_whole(found: Found, reasons: Mapping[fx.Node, str | None]) -> bool:
    return found.pattern.operator is not None and all(reasons[node] is None for node in found.nodes)


def _whole_region(found: Found, settings: Mapping[fx.Node, Setting]) -> Region:
    """All a pattern matched, under the record that stands for it."""
    whole = whole_of(found, found.pattern.operator)
    for node in found.nodes:
        node.meta["whole"] = whole
    return Region(found.nodes, found.pattern.name, settings[found.nodes[-1]], found.pattern)


def _of_one_match(nodes: Iterable[fx.Node], matches: Mapping[fx.Node, Found] | None) -> bool:
    """Whether a chain is inside one match, but for operators that select or clamp values; any is without patterns."""
    if matches is None:
        return True
    owners = {matches.get(node) for node in nodes if node in matches or not record_of(node).shares}
    return len(owners) == 1 and None not in owners


def _pattern_of(nodes: Iterable[fx.Node], owners: Mapping[fx.Node, Found]) -> QuantizerPattern | None:
    return next((owners[node].pattern for node in nodes if node in owners), None)


def fusable(nodes: Iterable[fx.Node]) -> bool:
    """Whether the kernel of a chain takes its operands: a sum that joins an accumulator does not broadcast, and a
    factor per channel goes with the accumulator's channels, and a unit is positive."""
    nodes = list(nodes)
    anchor = next((node for node in nodes if record_of(node).anchor), None)
    if anchor is None:
        return True
    joined = (node for node in nodes if record_of(node).name in SUMS)
    scaled = (node for node in nodes if record_of(node).name == "affine")
    positive = all(_is_positive(arguments(node)["other"]) for node in nodes if record_of(node).name in NUMBERS)
    return positive and all(_joins(node, anchor) for node in joined) and all(_scales(node, anchor) for node in scaled)


def _is_positive(number: object) -> bool:
    return isinstance(number, (int, float)) and 0 < number < float("inf")


def _scales(node: fx.Node, anchor: fx.Node) -> bool:
    """A factor per channel of the anchor and nothing added; depthwise kernels take none."""
    _, factor, offset = operands(node)
    if not is_constant(offset) or not is_constant(factor) or arguments(anchor).get("groups", 1) != 1:
        return False
    record, axes = record_of(node), len(tensor_type(node).shape)
    plain = not getattr(node.graph.owning_module, str(offset.target)).any()
    return plain and record.bind(call_of(node, record))["axis"] == output_axis(record_of(anchor).name, axes)


def _joins(node: fx.Node, anchor: fx.Node) -> bool:
    record, shape = record_of(node), tensor_type(node).shape
    if any(tensor_type(value).shape != shape for value in activations(node)):
        return False
    axis = record.bind(call_of(node, record)).get("axis")
    return axis is None or axis == output_axis(record_of(anchor).name, len(shape))


def _spread(regions: Iterable[Region]) -> set[Region]:
    """Anchors are quantized, and what patterns take for its own sake. Another region follows when all it reads is, or,
    if it only selects or clamps values, when all that read it are; where the residual stream is float only then, for
    what reaches a sum must not be rounded on the way. Layers that are quantized while the model runs read and give
    floats: nothing follows them."""
    regions = list(regions)
    reader = {node: region for region in regions for node in region.nodes}
    active = {region for region in regions if region.record.anchor or (region.pattern and region.pattern.alone)}
    roots = {region.root for region in active if not region.gives_float}
    changed = True
    while changed:
        before = len(active)
        for region in regions:
            follows = not (region.shares and region.setting.residual == "float")
            if region not in active and follows and all(value in roots for value in region.activations()):
                active.add(region)
                roots.add(region.root)
        for region in reversed(regions):
            readers = [reader.get(user) for user in region.root.users]
            if region not in active and region.shares and readers and all(_reads_levels(r, active) for r in readers):
                active.add(region)
                roots.add(region.root)
        changed = len(active) != before
    return active


def _reads_levels(region: Region | None, active: set[Region]) -> bool:
    return region in active and not region.dynamic


def _sites(graph: fx.Graph, regions: tuple[Region, ...], returned: Mapping[fx.Node, Setting]) -> tuple[Site, ...]:
    """``returned``: values that leave as levels, and their settings."""
    names = _Names()
    produced = {region.root: region for region in regions}
    static = [region for region in regions if not region.dynamic]
    wanted = {value: region for region in reversed(static) for value in region.activations()}
    sites: dict[tuple[str, str], Site] = {}
    symmetric = _second_factors(regions)
    for node in graph.nodes:
        if node in produced and (node in wanted or node in returned or not _may_give_float(produced[node])):
            site = _output_site(produced[node], names)
        elif (node in wanted or node in returned) and node not in produced:
            site = _activation(names.of(node), node, wanted[node].setting if node in wanted else returned[node])
        else:
            continue
        _put(sites, _around_zero(site) if node in symmetric else site)
    _operand_sites(regions, sites, names)
    for value, reason in find_shortcuts(regions).items():
        if reason is None:
            _put(sites, _shortcut(sites[value.name, "activation"]))
    shared = {site.name: _share(site, produced, sites) for site in sites.values()}
    for region in regions:
        if region.record.variadic and region.shares:
            _join([sites[value.name, "activation"].name for value in region.activations()], shared)
    return _in_order(graph, shared.values())


def _annotated_sites(graph: fx.Graph, regions: tuple[Region, ...], written: Written) -> tuple[Site, ...]:
    """Of every value that an annotator wants as levels. All of a group are counted, but for those that are selected
    from another of it."""
    names = _Names()
    sites: dict[tuple[str, str], Site] = {}
    second = {written.leaders.get(node) for node in _second_factors(regions)}
    selected = {region.root for region in regions if region.shares}
    plain = {node: written.levels[node].site(names.of(node), node) for node in graph.nodes if node in written.levels}
    for node, site in plain.items():
        leader = written.leaders[node]
        found = _around_zero(site) if leader in second else site
        if leader is not node:
            found = replace(found, spec=Shared(plain[leader].name, observed=node not in selected))
        _put(sites, found)
    _operand_sites(regions, sites, names)
    return _in_order(graph, sites.values())


def _operand_sites(regions: Iterable[Region], sites: dict[tuple[str, str], Site], names: _Names) -> None:
    """Of rows, weights and biases."""
    for site in row_sites(regions, names.of):
        _put(sites, site)
    for region in regions:
        _parameters(region, sites, names)


def _in_order(graph: fx.Graph, sites: Iterable[Site]) -> tuple[Site, ...]:
    order = {node.name: index for index, node in enumerate(graph.nodes)}
    rank = {"activation": 0, "shortcut": 1, **dict.fromkeys(ROW_MODES, 2), "weight": 3, "bias": 4}
    return tuple(sorted(sites, key=lambda site: (order[site.value], rank[site.role])))


def _second_factors(regions: Sequence[Region]) -> set[fx.Node]:
    """What kernels read as they read weights, keys and values of attention among it, and all that shares parameters
    with that."""
    found: set[fx.Node] = set()
    for region in regions:
        if region.record.roles.weight is None and region.record.anchor and "whole" not in region.root.meta:
            values = operands(region.anchor)
            found.update(values[operand] for operand in region.record.roles.x[1:])
    alike = [{region.root, *region.activations()} for region in regions if region.shares]
    while joined := [values for values in alike if values & found and not values <= found]:
        found.update(*joined)
    return found


def _around_zero(site: Site) -> Site:
    """With levels around 128, which kernels read as signed ones: 1..255, or as many as fewer bits have."""
    if not isinstance(site.spec, Observed) or site.dtype is not DType.U8:
        return site
    half = (site.qmax - site.qmin) // 2
    return replace(site, spec=replace(site.spec, symmetric=True), qmin=128 - half, qmax=128 + half)


def _may_give_float(region: Region) -> bool:
    """Whether an accumulator may leave the region dequantized."""
    plain = len(region.nodes) == 1 or region.name == "product_number"
    return plain and region.record.anchor and region.record.name in (*ACCUMULATING, *RECURRENT)


def _join(names: list[str], sites: dict[str, Site]) -> None:
    """The operands of a concatenation share parameters: the owners behind all of them follow the first."""

    def owner(name: str) -> str:
        while isinstance(spec := sites[name].spec, Shared):
            name = spec.site
        return name

    for name in names[1:]:
        if owner(name) != owner(names[0]):
            sites[owner(name)] = replace(sites[owner(name)], spec=Shared(owner(names[0]), observed=True))


def _put(sites: dict[tuple[str, str], Site], site: Site) -> None:
    sites.setdefault((site.value, site.role), site)


def _output_site(region: Region, names: _Names) -> Site:
    return _activation(names.of(region.root), region.root, region.setting)


def _activation(name: str, node: fx.Node, setting: Setting) -> Site:
    if "zero_points" in node.meta:  # pixels less their zero points: the levels are bytes
        fixed = Fixed(1.0, node.meta["zero_points"])
        return Site(name, node.name, "activation", fixed, DType.U8, 0, 255, 1, origin(node), "u8")
    kind = setting.activation
    spec = Observed("minmax" if kind.floating else setting.method, not kind.zero_point)
    return Site(name, node.name, "activation", spec, kind.storage, kind.qmin, kind.qmax, None, origin(node), kind.name)


def _shortcut(site: Site) -> Site:
    """The same value in 16 bits."""
    low, high = numerics.STEPS * site.qmin, numerics.STEPS * site.qmax + numerics.STEPS - 1
    return replace(site, name=f"{site.name}:shortcut", role="shortcut", spec=Derived((site.name,)), dtype=DType.U16,
                   qmin=low, qmax=high)  # fmt: skip


def _share(site: Site, produced: Mapping[fx.Node, Region], sites: Mapping[tuple[str, str], Site]) -> Site:
    region = next((r for node, r in produced.items() if node.name == site.value), None)
    if site.role != "activation" or region is None or not region.shares:
        return site
    partner = sites[region.activations()[0].name, "activation"]
    return replace(partner, name=site.name, value=site.value, spec=Shared(partner.name), origin=site.origin)


def _parameters(region: Region, sites: dict[tuple[str, str], Site], names: _Names) -> None:
    """Weight and bias sites of an anchor: one per weight tensor, one bias per call."""
    record = region.record
    for site in weight_sites(region.anchor, names.weight) if record.name in RECURRENT else ():
        _put(sites, site)
    if record.roles.weight is None:
        return
    values = operands(region.anchor)
    x, weight, bias = (values[i] for i in (record.roles.x[0], record.roles.weight, record.roles.bias))
    per_channel, kind = region.setting.weights != "tensor", region.setting.weight
    group = group_of(origin(region.anchor), region.setting, record.roles.outputs)
    low, high = kind.stored(group)
    weight_site = Site(names.weight(weight), weight.name, "weight", Observed("absmax", True), kind.storage, low, high,
                       record.roles.outputs if per_channel else None, origin(region.anchor), kind.name,
                       group)  # fmt: skip
    _put(sites, weight_site)
    if region.dynamic or bias is None:
        return
    if sites[weight.name, "weight"].native and sites[x.name, "activation"].native:
        sources = (sites[x.name, "activation"].name, sites[weight.name, "weight"].name)
        _put(sites, Site(f"{names.of(region.anchor)}:bias", region.anchor.name, "bias", Derived(sources), DType.I32,
                         -(2**31), 2**31 - 1, 0 if per_channel else None, origin(region.anchor)))  # fmt: skip


class _Names:
    """``module.path#call/operator.number``: number counts equal operators of one module call."""

    def __init__(self) -> None:
        self._count: dict[str, int] = {}
        self._known: dict[fx.Node, str] = {}
        self._weights: dict[str, fx.Node] = {}

    def of(self, node: fx.Node) -> str:
        if node not in self._known:
            self._known[node] = self._new(node)
        return self._known[node]

    def weight(self, node: fx.Node) -> str:
        """The parameter's name; ``@1`` marks another tensor made from it (calls that fold different batch norms)."""
        path = node.meta.get("path") or str(node.target)
        name, number = path, 0
        while self._weights.setdefault(name, node) is not node:
            number += 1
            name = f"{path}@{number}"
        return name

    def _new(self, node: fx.Node) -> str:
        if "zero_points" in node.meta:
            node = node.args[1]
        if node.op == "placeholder":
            return f"#0/input.{node.name}"
        path, _, call = origin(node).path.partition("@")
        kind = origin(node).operator.split(".")[1] if "." in origin(node).operator else str(node.target)
        stem = f"{path}#{call or 0}/{kind}"
        number = self._count[stem] = self._count.get(stem, -1) + 1
        return f"{stem}.{number}"


def macs(node: fx.Node) -> int:
    """Multiply-accumulates of a convolution, linear layer or matrix product; 0 for the rest.

    Counted at batch 1 and, where other dimensions are free, at their size in the example.
    """
    sizes = node.graph.owning_module.meta.get("sizes", {})
    if is_recurrent(node) or operator(node) == RECURRENT_CALL:
        work = recurrent_macs(node)
        return evaluate(work, {name: sizes.get(name, 1) for name in symbols_of(work)})
    name = operator(node).split(".")[1] if operator(node).startswith("aten.") else ""
    kinds = [tensor_type(value) for value in node.all_input_nodes]
    if not name.startswith(PRODUCTS) or tensor_type(node) is None or len(kinds) < 2 or None in kinds[:2]:
        return 0
    a, b, result = kinds[0].shape, kinds[1].shape, tensor_type(node).shape
    if name.startswith("conv_transpose"):
        total = numel(a) * numel(b[1:])
    elif name.startswith(("conv", "linear")):
        total = numel(result) * numel(b[1:])
    elif name.startswith("scaled_dot_product"):
        total = numel(a) * b[-2] * 2
    else:
        total = numel(result) * (b[-1] if name == "addmm" else a[-1])
    return evaluate(total, {name: sizes.get(name, 1) for name in symbols_of(total)})


PRODUCTS = ("conv", "linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product")
"""ATen operators (beginnings of their names) whose work is counted in multiply-accumulates."""


def _counts(node: fx.Node) -> bool:
    """Operators worth a line in the report: they compute floating-point tensors. States that are zero are nobody's."""
    kind = tensor_type(node)
    if operator(node) in ZEROS and node.users and all(is_recurrent(user) for user in node.users):
        return False
    if node.target is python_operator.getitem or "dim" in node.meta:
        return False
    if operator(node).startswith("quantized_decomposed."):  # of a part that is quantized already
        return False
    return kind is None or kind.dtype in (DType.F32, DType.F64, DType.F16, DType.BF16)


def _skip(node: fx.Node, reason: str | None) -> Skip:
    default = LOOSE_NORM if "batch_norm" in origin(node).operator else "no quantized operator beside it"
    return Skip(node.name, reason or default, origin(node), macs(node))


LOOSE_NORM = "a batch norm that nothing absorbs: no convolution beside it, or one that pads or has other readers"
