"""Decide which values of a prepared graph are quantized: match regions, place sites, and give reasons for the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from torch import fx

from intaglio.errors import SelectorError
from intaglio.fusion.table import FUNCTION, FUNCTION_AFFINE
from intaglio.fxgraph.float_forms import has_float_form, has_program_form
from intaglio.fxgraph.node_info import info, origin, tensor_type
from intaglio.fxgraph.nodes import known_record, operator, record_of
from intaglio.fxgraph.passes.identities import COPIES
from intaglio.fxgraph.reader_aliases import is_reader_alias
from intaglio.fxgraph.uneven_concatenations import is_concatenation
from intaglio.ir import DType
from intaglio.quant.annotate.embedding_tables import find_embedding_tables
from intaglio.quant.annotate.find_regions import (
    PRECISE_ROWS,
    find_regions,
    find_shortcuts,
    first_last_reasons,
    quantized_regions,
)
from intaglio.quant.annotate.find_sites import find_sites
from intaglio.quant.annotate.from_annotator import annotations_from_annotator, run_annotator
from intaglio.quant.annotate.int8_buffers import buffer_names, check_buffer_sites, selected_buffers
from intaglio.quant.annotate.refusals import divisor_refusal, reasons_beside, refusal, skipped
from intaglio.quant.annotate.regions import NO_DATA_FLOATS, Annotations, DataFloats, Region, mark_operators
from intaglio.quant.annotate.sites import groups
from intaglio.quant.annotate.weight_only import find_weight_only
from intaglio.quant.precision.float_results import FloatForms, float_layer_reasons, float_results, leave_float
from intaglio.quant.qdq.integer_regions import marked_operators, write_regions
from intaglio.quant.qdq.qdq_normalize import quantizes
from intaglio.quant.recipes.choices import CacheType
from intaglio.quant.recipes.pattern_rewrites import replacements
from intaglio.quant.recipes.quantizer import Quantizer, flat_patterns
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting
from intaglio.quant.recipes.user_patterns import Found, Rejected, find, name_operators, patterns_of
from intaglio.tracing.loops.while_loops import nodes_with_loop_bodies


def annotate_graph(
    module: fx.GraphModule,
    quantizer: Quantizer,
    classes: Mapping[str, str],
    data_floats: DataFloats = NO_DATA_FLOATS,
) -> Annotations:
    """Annotate a graph that the passes of post-training quantization have rewritten.

    Args:
        module: the graph. Annotators may insert ``alias`` nodes into it.
        quantizer: recipe, patterns, annotator and other options.
        classes: module path -> class name, for the selectors of the recipe.
        data_floats: values that stay in float because of the calibration data. An annotator decides about them itself.
    """
    recipe, graph = quantizer.recipe, module.graph
    name_operators(graph, quantizer.operators)
    annotator = quantizer.annotator
    resolved = None if annotator is None else run_annotator(module, annotator)
    computing = [node for node in graph.nodes if node.op == "call_function" and not _is_marker(node)]
    recipe.check((origin(node) for node in nodes_with_loop_bodies(module) if node.op == "call_function"), classes)
    settings = {node: recipe.setting(origin(node), classes) for node in computing}
    if resolved is not None:
        settings = {node: resolved.setting(node, setting) for node, setting in settings.items()}
    reasons = {node: refusal(node, settings[node]) for node in computing}
    rejected: list[Rejected] = []
    matches: dict[fx.Node, Found] | None = None
    if quantizer.patterns:
        patterns = patterns_of(flat_patterns(quantizer.patterns))
        won, rejected = find(graph, patterns, reasons, replacements(graph, patterns))
        matches = {node: found for found in won for node in found.nodes}
        _apply_patterns(matches, recipe, classes, settings, reasons)
    if annotator is not None and resolved is not None:
        buffers, returned = _returned_quantized(graph, quantizer, classes)
        return annotations_from_annotator(
            module, annotator, resolved.with_quantized(returned), settings, reasons, buffers
        )
    reasons |= {node: divisor_refusal(node, module) for node in computing if reasons[node] is None}
    found = find_regions(graph, settings, reasons, matches)
    regions = quantized_regions(found)
    if quantizer.skip_first or quantizer.skip_last:
        reasons.update(first_last_reasons(graph, regions, quantizer))
        regions = quantized_regions(region for region in found if reasons[region.root] is None)
    if data_floats.layers:
        reasons.update(float_layer_reasons(regions, data_floats))
        regions = quantized_regions(region for region in found if reasons[region.root] is None)
    beside = reasons_beside(found, regions, reasons)
    returned = _returned_quantized(graph, quantizer, classes)[1]
    if floats := float_results(regions, returned, _float_forms(module), data_floats):
        found = find_regions(graph, settings, reasons, matches, floats=floats)
        regions = leave_float(quantized_regions(found), floats, reasons, data_floats)
    write_regions(graph, regions)
    tables = find_embedding_tables(settings)
    skips = skipped(regions, tables, {node: reason or beside.get(node) for node, reason in reasons.items()})
    weight_only = find_weight_only(regions, settings)
    decided = Annotations(
        module, (), regions, skips, {}, tuple(rejected), tables, weight_only=weight_only, data_floats=data_floats
    )
    return _with_sites(decided, quantizer, classes)


def quantized_concatenations(
    annotations: Annotations, quantizer: Quantizer, classes: Mapping[str, str]
) -> dict[str, Region]:
    """Return the concatenations with one scale that could stay in float, because only floats are read, by node name."""
    found = {region.root.name: region for region in annotations.regions if is_concatenation(region.anchor)}
    if not found or quantizer.annotator is not None:
        return {}
    module = annotations.module
    returned = _returned_quantized(module.graph, quantizer, classes)[1]
    floats = float_results(annotations.regions, returned, _float_forms(module), DataFloats(frozenset(found)))
    return {name: region for name, region in found.items() if region.root in floats}


def _float_forms(module: fx.GraphModule) -> FloatForms:
    return FloatForms(partial(has_float_form, module=module), partial(has_program_form, module=module))


def reannotate_graph(
    before: Annotations, module: fx.GraphModule, quantizer: Quantizer, classes: Mapping[str, str]
) -> Annotations:
    """Return the annotations of a graph with the same operators, whose constants and inputs were changed.

    Regions and skipped operators are those of `before`; a division by smoothing factors joins the function in front of
    it. A user's annotator runs again, because it may decide by what it sees in the changed graph.
    """
    if quantizer.annotator is not None:
        return annotate_graph(module, quantizer, classes)
    graph = module.graph
    nodes, known = {node.name: node for node in graph.nodes}, {node.name for node in before.module.graph.nodes}
    divisions = {
        node.args[1]: node for node in graph.nodes if info(node).divides_by_smoothing and node.name not in known
    }
    regions = tuple(_changed_region(region, nodes, divisions) for region in before.regions)
    inside = {node for region in regions for node in region.nodes}
    reasons = {n: refusal(n, quantizer.recipe.setting(origin(n), classes)) for n in divisions.values()}
    skips = [*before.skipped, *skipped(regions, (), reasons)]
    order = {name: index for index, name in enumerate(nodes)}
    others = [(mark.fusion, chain) for mark, chain in marked_operators(graph).items() if not inside.intersection(chain)]
    mark_operators(graph, [*(region.matched for region in regions), *others])
    tables = tuple(replace(table, node=nodes[table.node.name]) for table in before.tables)
    skips.sort(key=lambda skip: order[skip.node])
    found = replace(before, module=module, regions=regions, skipped=tuple(skips), tables=tables)
    return _with_sites(found, quantizer, classes)


def _changed_region(region: Region, nodes: Mapping[str, fx.Node], divisions: Mapping[fx.Node, fx.Node]) -> Region:
    """Return a region with the nodes of a changed graph."""
    own = region.in_graph(nodes)
    if own.name == FUNCTION.name and own.root in divisions:
        return replace(own, nodes=(*own.nodes, divisions[own.root]), name=FUNCTION_AFFINE.name)
    return own


def _with_sites(found: Annotations, quantizer: Quantizer, classes: Mapping[str, str]) -> Annotations:
    """Return annotations with the sites of their regions, and of values that leave the model quantized."""
    graph = found.module.graph
    buffers, returned = _returned_quantized(graph, quantizer, classes)
    leaving = {node: quantizer.recipe.setting(origin(buffers.get(node, node)), classes) for node in returned}
    sites = check_buffer_sites(buffers, find_sites(graph, found.regions, leaving, buffers))
    outputs = frozenset(node.name for node in returned)
    return replace(found, sites=sites, leaders=groups(sites), outputs=outputs, buffers=buffer_names(buffers))


def _returned_quantized(
    graph: fx.Graph, quantizer: Quantizer, classes: Mapping[str, str]
) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, None]]:
    """Return the quantized buffers and cached inputs with their values after a call, and all values that leave the
    model quantized."""
    buffers = selected_buffers(graph, quantizer.buffers) | _quantized_cache(graph, quantizer, classes)
    returned = _returned(graph) if quantizer.integers else {}
    return buffers, returned | dict.fromkeys([*buffers, *buffers.values()])


def _quantized_cache(graph: fx.Graph, quantizer: Quantizer, classes: Mapping[str, str]) -> dict[fx.Node, fx.Node]:
    """Return the cached inputs that are int8 -> the results that later calls receive in their place, or themselves if
    another model computes these.

    The setting ``cache`` of their readers decides. With "auto", those that another model computes are int8 if only
    quantized attention reads them: the results are the same, and the values are not rounded again in every call.

    Args:
        graph: a captured graph.
        quantizer: its `cached_inputs` are positions among the inputs and results of the graph.
        classes: module path -> class name, for the selectors of the recipe.

    Raises:
        SelectorError: the graph has no input or result at a position.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    found: dict[fx.Node, fx.Node] = {}
    for position, result in quantizer.cached_inputs.items():
        if not 0 <= position < len(inputs) or not 0 <= (result or 0) < len(results):
            problem = f"{{{position}: {result}}}, but the model has {len(inputs)} inputs and {len(results)} results"
            raise SelectorError("cached_inputs", None, problem, remedy="count tensors from 0")
        node = inputs[position]
        settings = {reader: quantizer.recipe.setting(origin(reader), classes) for reader in _readers_of_values(node)}
        chosen = any(one.quantize is not False and one.cache == CacheType.INT8 for one in settings.values())
        once = result is None and not quantizer.patterns and quantizer.annotator is None
        rounded = once and all(_rounds_its_cache(reader, one) for reader, one in settings.items())
        if _is_float(node) and (chosen or (rounded and settings)):
            found[node] = node if result is None else results[result]
    return found


def _is_float(node: fx.Node) -> bool:
    kind = tensor_type(node)
    return kind is not None and kind.dtype is DType.F32


def _readers_of_values(node: fx.Node) -> list[fx.Node]:
    """Return the operators that read a node, apart from those that read its sizes."""
    return [reader for reader in node.users if reader.op == "call_function" and info(reader).dim is None]


def _rounds_its_cache(reader: fx.Node, setting: Setting) -> bool:
    """Return whether an operator is attention that reads uint8, and has the setting ``cache = "auto"``."""
    record, plain = record_of(reader), setting.bits != 7 and setting.activations_dtype in (None, DType.U8.value)
    own = record is not None and record.is_attention and setting.cache == CacheType.AUTO
    return own and plain and refusal(reader, setting) is None


def _returned(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return the float32 results that operators compute."""
    results = next(node for node in graph.nodes if node.op == "output").args[0]
    made = [node for node in results if node.op == "call_function" and operator(node) not in COPIES]
    kinds = {node: tensor_type(node) for node in made}
    return {node: None for node, kind in kinds.items() if kind is not None and kind.dtype is DType.F32}


def _is_marker(node: fx.Node) -> bool:
    """Return whether a node is only a marker: image pixels, or an alias for a reader with its own parameters."""
    return info(node).zero_points is not None or is_reader_alias(node)


def _apply_patterns(
    matches: Mapping[fx.Node, Found],
    recipe: Recipe,
    classes: Mapping[str, str],
    settings: dict[fx.Node, Setting],
    reasons: dict[fx.Node, str | None],
) -> None:
    """Update settings and reasons as the user's patterns say.

    Operators that only select or clamp values need no pattern, because they follow the operator in front of them.
    """
    for node in tuple(settings):
        found = matches.get(node)
        if found is None:
            if reasons[node] is None and not known_record(node).shares_qparams:
                reasons[node] = "no pattern matches it"
            continue
        if found.pattern.setting is not None:
            own = replace(recipe, default=found.pattern.setting.with_defaults(recipe.default))
            settings[node] = own.setting(origin(node), classes)
        reasons[node] = None if settings[node].quantize else f"the pattern {found.pattern.name} leaves it in float"


def match_notes(annotations: Annotations) -> tuple[str, ...]:
    """Return a line for reports that counts the regions of each pattern, and the matches that its callback replaced by
    quantized operators; an empty tuple without patterns."""
    counts = Counter(region.pattern.name for region in annotations.regions if region.pattern is not None)
    replaced = {info(node).rewritten_by for node in annotations.module.graph.nodes if quantizes(node)}
    replaced -= {info(node).rewritten_by for region in annotations.regions for node in region.nodes}
    counts.update(group[0] for group in replaced if group is not None)
    rejected = len(annotations.rejected)
    if not counts and not rejected:
        return ()
    found = ", ".join(f"{name} x {count}" for name, count in sorted(counts.items())) or "none"
    lost = f"; {rejected} match{'es' * (rejected != 1)} rejected, for the reasons in text('sites')" if rejected else ""
    return (f"patterns: {found}{lost}",)


def notes_of(regions: Iterable[Region]) -> tuple[str, ...]:
    """Return notes on precise functions, on weights with few bits, and on shortcuts that have 8 bits instead of 16."""
    regions = list(regions)
    counts = Counter(known_record(region.root).name for region in regions if region.name in PRECISE_ROWS)
    found = ", ".join(f"{name} x {count}" for name, count in sorted(counts.items()))
    notes = [f"functions computed in float32: {found}; all others are lookup tables of 256 entries"] if found else []
    settings = [region.setting for region in regions if region.record.roles.weight is not None]
    packed = Counter(str(packing) for setting in settings if (packing := setting.weight.packing(setting.group)))
    found = ", ".join(f"{kind} x {count}" for kind, count in sorted(packed.items()))
    notes += [f"weights: {found}; products are those of int8 weights"] if found else []
    moved = {region.root for region in regions if region.is_data_movement}
    short = {node: reason for node, reason in find_shortcuts(regions).items() if reason and node not in moved}
    notes += [f"shortcut {origin(node).path or node.name}: 8 bits, because {reason}" for node, reason in short.items()]
    return tuple(notes)
