"""Turn the annotations of a user's annotator into regions, sites, and quantized edges outside of regions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from intaglio.errors import UnsupportedError
from intaglio.fxgraph.node_info import TAG_KEY
from intaglio.quant.annotate.embedding_tables import find_embedding_tables
from intaglio.quant.annotate.find_regions import find_regions
from intaglio.quant.annotate.find_sites import (
    ValueNames,
    add_operand_sites,
    add_site,
    as_signed,
    in_execution_order,
    share_buffer_parameters,
    signed_operands,
)
from intaglio.quant.annotate.int8_buffers import buffer_names, check_buffer_sites
from intaglio.quant.annotate.node_annotations import Annotator, ResolvedAnnotations, resolve
from intaglio.quant.annotate.refusals import skipped
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import Fixed, Observed, Shared, Site, groups
from intaglio.quant.annotate.weight_only import find_weight_only
from intaglio.quant.frontends.pt2e_compat import annotations_of, exported_view
from intaglio.quant.qdq.integer_regions import write_regions
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.settings import Setting


def annotations_from_annotator(
    module: fx.GraphModule,
    annotator: Annotator,
    resolved: ResolvedAnnotations,
    settings: Mapping[fx.Node, Setting],
    reasons: dict[fx.Node, str | None],
    buffers: Mapping[fx.Node, fx.Node],
) -> Annotations:
    """Return the `Annotations` that an annotator asks for.

    Fusion rows and operators form regions where they fit between the values that the annotator wants quantized. All
    other annotated values are quantized and dequantized around float operators.
    """
    for node in settings:
        if reasons[node] is None and node not in resolved.nodes:
            reasons[node] = "the annotator did not annotate it"
    regions = tuple(find_regions(module.graph, settings, reasons, None, resolved))
    write_regions(module.graph, regions)
    sites = _with_replaced_specs(_annotated_sites(module.graph, regions, resolved, buffers), annotator)
    sites = check_buffer_sites(buffers, sites)
    tables = find_embedding_tables({node: setting for node, setting in settings.items() if node in resolved.tables})
    inside = {node for region in regions for node in region.nodes}
    for node in settings:
        if reasons[node] is None and node not in inside:
            reasons[node] = "the annotation leaves an operand or the result of this kernel in float"
    edges = frozenset(
        (value.name, reader.name) for value, reader in resolved.edges if reader not in resolved.dynamic_modes
    )
    custom_observers = {
        (value.name, reader.name if reader else None): make
        for (value, reader), make in resolved.custom_observers.items()
    }
    outputs = frozenset(node.name for node in resolved.outputs)
    return Annotations(
        module,
        sites,
        regions,
        skipped(regions, tables, reasons),
        groups(sites),
        (),
        tables,
        edges,
        outputs,
        buffer_names(buffers),
        custom_observers,
        find_weight_only(regions, settings),
    )


def run_annotator(module: fx.GraphModule, annotator: Annotator) -> ResolvedAnnotations:
    """Run an annotator on a copy of the graph and resolve its annotations to nodes of `module`."""
    view = exported_view(module)
    annotations = annotations_of(view, annotator)
    tags = {node.name: node.meta[TAG_KEY] for node in view.graph.nodes if TAG_KEY in node.meta}
    for node in module.graph.nodes:
        node.meta |= {TAG_KEY: tags[node.name]} if node.name in tags else {}
    return resolve(module, annotations)


def _annotated_sites(
    graph: fx.Graph, regions: tuple[Region, ...], resolved: ResolvedAnnotations, buffers: Mapping[fx.Node, fx.Node]
) -> tuple[Site, ...]:
    """Return one site for every quantized value: annotated, buffer or output.

    All members of a sharing group are observed, except for those that are selected from another member.
    """
    names = ValueNames(graph)
    sites: dict[tuple[str, Role], Site] = {}
    second = {resolved.leaders.get(node) for node in signed_operands(regions, buffers)}
    selected = {region.root for region in regions if region.shares_qparams}
    plain = {
        node: resolved.quantized_as[node].site(names.of(node), node)
        for node in graph.nodes
        if node in resolved.quantized_as
    }
    for node, site in plain.items():
        leader = resolved.leaders[node]
        found = as_signed(site) if leader in second else site
        if leader is not node:
            found = replace(found, spec=Shared(plain[leader].name, observed=node not in selected))
        add_site(sites, found)
    named = {site.name: site for site in sites.values()}
    share_buffer_parameters(buffers, sites, named)
    sites = {(site.value, site.role): site for site in named.values()}
    add_operand_sites(regions, sites, names)
    return in_execution_order(graph, sites.values())


def _with_replaced_specs(sites: tuple[Site, ...], annotator: Annotator) -> tuple[Site, ...]:
    """Return the sites with the specs that the annotator's optional method ``specs`` returns for them."""
    if not hasattr(annotator, "specs"):
        return sites
    found = annotator.specs(sites)
    known = {site.name for site in sites if isinstance(site.spec, (Observed, Fixed))}
    if unknown := sorted(set(found) - known):
        raise UnsupportedError(
            unknown[0],
            None,
            "specs() returned this name, but no site of this name has parameters of its own",
            remedy="return only names of the given sites whose spec is Observed or Fixed; other sites follow these",
        )
    return tuple(replace(site, spec=found.get(site.name, site.spec)) for site in sites)
