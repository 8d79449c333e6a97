"""Group operators into regions that run as one kernel, and select the regions that are quantized."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from torch import fx

from intaglio.fusion.fusion_record import Fusion, match_rows
from intaglio.fusion.table import GRAPH_FUSIONS
from intaglio.fxgraph.fx_graph_view import FxGraphView
from intaglio.fxgraph.node_info import update_info
from intaglio.fxgraph.nodes import activations, known_record
from intaglio.ir import DType
from intaglio.quant.annotate.node_annotations import ResolvedAnnotations
from intaglio.quant.annotate.regions import Region
from intaglio.quant.recipes.choices import FunctionForm, ResidualType
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.settings import Setting
from intaglio.quant.recipes.user_patterns import Found, QuantizerPattern, composite_match


def quantized_regions(found: Iterable[Region]) -> tuple[Region, ...]:
    """Return those of the regions found that are quantized, in execution order."""
    regions = list(found)
    active = _propagate_quantization(regions)
    return tuple(region for region in regions if region in active)


def first_last_reasons(graph: fx.Graph, regions: Iterable[Region], quantizer: Quantizer) -> dict[fx.Node, str]:
    """Return the operators of the first and last regions, with the reason why they stay in float.

    Regions that only select or clamp values do not count as first or last, because they compute nothing.
    """
    counted = [region for region in regions if not all(known_record(node).shares_qparams for node in region.nodes)]
    inside = {node for region in counted for node in region.nodes}
    before: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or (node not in inside and before.intersection(node.all_input_nodes)):
            before.add(node)
    tail: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or (node not in inside and tail.intersection(node.users)):
            tail.add(node)
    reasons: dict[fx.Node, str] = {}
    for region in counted:
        if quantizer.skip_first and any(before.intersection(node.all_input_nodes) for node in region.nodes):
            reasons.update(dict.fromkeys(region.nodes, "skip_first: nothing quantized comes before it"))
        elif quantizer.skip_last and tail.intersection(region.root.users):
            reasons.update(dict.fromkeys(region.nodes, "skip_last: nothing quantized comes after it"))
    return reasons


def reads_shortcut(region: Region, node: fx.Node, value: fx.Node, shortcuts: Mapping[fx.Node, str | None]) -> bool:
    """Return whether an operator of a region reads a value with 16 bits.

    It does if it is an addition after an anchor whose recipe asks for 16-bit shortcuts, or a data movement whose result
    has 16 bits.
    """
    if value not in shortcuts or shortcuts[value] is not None:
        return False
    return region.root in shortcuts if region.is_data_movement else region.adds_shortcut and node is not region.anchor


def find_shortcuts(regions: Iterable[Region]) -> dict[fx.Node, str | None]:
    """Find the values that a residual addition wants in 16 bits, including those that data movement copies them from.

    Returns:
        Value -> ``None``, or the reason why it has only 8 bits.
    """
    regions = list(regions)
    produced = {region.root: region for region in regions}
    found: dict[fx.Node, str | None] = {}

    def want(value: fx.Node) -> str | None:
        region = produced.get(value)
        reason: str | None
        if region is None:
            reason = "no quantized operator computes it"
        elif region.is_data_movement:
            reason = want(region.activations()[0])
        elif region.setting.activation.storage is not DType.U8:
            reason = f"its quantized values are {region.setting.activation.name}"
        else:
            wide = region.record.accumulates and region.name not in PRECISE_ROWS
            reason = None if wide else f"{region.name} computes it"
        found[value] = reason
        return reason

    for region in regions:
        if region.adds_shortcut:
            for value in (v for node in region.nodes[1:] for v in activations(node)):
                if value is not None and value not in region.nodes and value not in found:
                    want(value)
    return found


PRECISE_ROWS = frozenset(row.name for row in GRAPH_FUSIONS if row.precise)
"""Names of the fusion rows that compute a function precisely instead of through a 256-entry lookup table."""


def find_regions(
    graph: fx.Graph,
    settings: Mapping[fx.Node, Setting],
    reasons: Mapping[fx.Node, str | None],
    matches: Mapping[fx.Node, Found] | None,
    resolved: ResolvedAnnotations | None = None,
    floats: Collection[fx.Node] = (),
) -> list[Region]:
    """Match all fusion rows, longest first, then single operators; return the regions in execution order.

    Args:
        graph: the graph to match in.
        settings: the setting of every operator.
        reasons: why an operator stays in float; only those with ``None`` are matched.
        matches: operator -> the match of a user's pattern. With patterns, a region is inside one match, and a pattern
            with an operator of its own makes exactly one region.
        resolved: an annotator's annotations, which regions must fit.
        floats: results that are only read as floats. A function of an accumulator is one kernel with it then, even if
            the recipe asks for lookup tables.
    """
    view, owners = FxGraphView(graph), matches or {}
    nodes = [node for node in settings if reasons[node] is None]
    found = [_composite_region(one, settings) for one in dict.fromkeys(owners.values()) if _is_composite(one, reasons)]
    taken = {node for region in found for node in region.nodes}

    def accept(row: Fusion, chain: tuple[fx.Node, ...]) -> Region | None:
        if any(reasons[node] is not None for node in chain) or not _of_one_match(chain, matches):
            return None
        if row.precise and settings[chain[-1]].functions != FunctionForm.PRECISE and chain[-1] not in floats:
            return None
        if not (_same_setting(chain, settings) if resolved is None else resolved.accepts(chain)):
            return None
        setting, own = settings[chain[-1] if resolved is None else chain[0]], settings[chain[0]]
        if own != setting:
            setting = replace(setting, operand_bytes=own.operand_bytes, weight_bytes=own.weight_bytes)
        return Region(chain, row.name, setting, _pattern_of(chain, owners))

    found += match_rows(GRAPH_FUSIONS, nodes, view, accept, taken)
    found += [
        Region((node,), known_record(node).name, settings[node], _pattern_of((node,), owners))
        for node in nodes
        if node not in taken
        and (resolved.accepts((node,)) if resolved else not _only_after_product(node, settings[node]))
    ]
    return sorted(found, key=lambda region: view.position(region.root))


OF_ONE_OPERATOR: Mapping[str, None] = dict.fromkeys(
    ("functions", "shortcut", "residual", "results", "operand_bytes", "weight_bytes")
)
"""Options of single operators, which the others of a chain need not have."""


def _same_setting(nodes: Iterable[fx.Node], settings: Mapping[fx.Node, Setting]) -> bool:
    """Return whether all operators of a chain have the same setting, apart from options of single operators."""
    return len({replace(settings[node], **OF_ONE_OPERATOR) for node in nodes}) == 1


def _only_after_product(node: fx.Node, setting: Setting) -> bool:
    """Return whether the recipe keeps a function or a scaling in float unless it directly follows a matrix product."""
    record = known_record(node)
    return setting.residual == ResidualType.FLOAT and (record.computes_on_accumulator or record.multiplies_by_scalar)


def _is_composite(found: Found, reasons: Mapping[fx.Node, str | None]) -> bool:
    """Return whether a pattern match becomes one composite operator, and all its operators can be quantized."""
    return found.pattern.operator is not None and all(reasons[node] is None for node in found.nodes)


def _composite_region(found: Found, settings: Mapping[fx.Node, Setting]) -> Region:
    """Return the region of a pattern match that is replaced by one composite operator."""
    assert found.pattern.operator is not None, f"{found.pattern.name} has no record of its own"
    composite = composite_match(found, found.pattern.operator)
    for node in found.nodes:
        update_info(node, composite=composite)
    return Region(found.nodes, found.pattern.name, settings[found.nodes[-1]], found.pattern)


def _of_one_match(nodes: Iterable[fx.Node], matches: Mapping[fx.Node, Found] | None) -> bool:
    """Return whether a chain is inside one match; operators that only select or clamp values may be outside.

    Without patterns every chain is accepted.
    """
    if matches is None:
        return True
    owners = {matches.get(node) for node in nodes if node in matches or not known_record(node).shares_qparams}
    return len(owners) == 1 and None not in owners


def _pattern_of(nodes: Iterable[fx.Node], owners: Mapping[fx.Node, Found]) -> QuantizerPattern | None:
    """Return the user's pattern that matched one of the operators, if any."""
    return next((owners[node].pattern for node in nodes if node in owners), None)


def _propagate_quantization(regions: Iterable[Region]) -> set[Region]:
    """Return the regions to quantize, starting from the anchors and spreading to their neighbours.

    Anchors are quantized, and so are matches of patterns with ``quantize_always``. Another region follows when
    everything it reads is quantized. A region that only selects or clamps values also follows when all its readers are
    quantized. With a float residual stream such regions follow only in this second way, because a value must not be
    rounded before an addition. A clamp of the result of a float operator stays in float with it, because quantizing
    after the clamp is finer. Dynamically quantized layers read and return floats, so no region follows them.
    """
    regions = list(regions)
    reader = {node: region for region in regions for node in region.nodes}
    active = {
        region for region in regions if region.record.anchor or (region.pattern and region.pattern.quantize_always)
    }
    roots = {region.root for region in active if not region.returns_float}
    changed = True
    while changed:
        before = len(active)
        for region in regions:
            follows = not (region.shares_qparams and region.setting.residual == ResidualType.FLOAT)
            if region not in active and follows and all(value in roots for value in region.activations()):
                active.add(region)
                roots.add(region.root)
        for region in reversed(regions):
            readers = [reader.get(user) for user in region.root.users]
            if region in active or not region.shares_qparams or _clamps_float(region):
                continue
            if readers and all(_reads_quantized(r, region.root, active) for r in readers):
                active.add(region)
                roots.add(region.root)
        changed = len(active) != before
    return active


def _clamps_float(region: Region) -> bool:
    """Return whether a region clamps the result of an operator that stays in float.

    It is called for regions whose input is not quantized, so any operator in front of them is a float operator.
    """
    return region.record.clamps and region.activations()[0].op == "call_function"


def _reads_quantized(region: Region | None, value: fx.Node, active: set[Region]) -> bool:
    """Return whether `region` reads `value` quantized; attention reads its mask in float."""
    return region in active and not region.dynamic and value in region.activations()
