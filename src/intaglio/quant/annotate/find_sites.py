"""Find the quantization sites of a graph: activations, weights, biases, and the sites that share parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import info, origin
from intaglio.fxgraph.nodes import layer_operands, operands, operator
from intaglio.ir import SIGN_OFFSET, DType
from intaglio.quant.annotate.find_regions import find_shortcuts
from intaglio.quant.annotate.per_token import dynamic_sites
from intaglio.quant.annotate.recurrent_sites import recurrent_weight_sites
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Derived, Fixed, Observed, Shared, Site
from intaglio.quant.qdq.qdq_normalize import dequantized_u8_qparams
from intaglio.quant.qdq.weight_grid import group_of
from intaglio.quant.recipes.choices import Role, WeightScales
from intaglio.quant.recipes.settings import Setting


def find_sites(
    graph: fx.Graph,
    regions: tuple[Region, ...],
    returned: Mapping[fx.Node, Setting],
    buffers: Mapping[fx.Node, fx.Node],
) -> tuple[Site, ...]:
    """Return all sites of a graph, in execution order.

    Args:
        graph: the prepared graph.
        regions: its quantized regions.
        returned: values that leave the model quantized, with their settings; quantized buffers are among them.
        buffers: quantized buffers -> their values after a call.
    """
    names = ValueNames(graph)
    produced = {region.root: region for region in regions}
    static = [region for region in regions if not region.dynamic]
    wanted = {value: region for region in reversed(static) for value in region.activations()}
    wanted |= {
        region.float_tail[-1]: region for region in static if region.float_tail and region.float_tail[-1] in wanted
    }
    sites: dict[tuple[str, Role], Site] = {}
    symmetric = signed_operands(regions, buffers)
    for node in graph.nodes:
        if node in produced and (node in wanted or node in returned or not _may_return_float(produced[node])):
            site = _output_site(produced[node], names)
        elif (node in wanted or node in returned) and node not in produced:
            site = activation_site(names.of(node), node, wanted[node].setting if node in wanted else returned[node])
        else:
            continue
        add_site(sites, _with_model_qparams(as_signed(site) if node in symmetric else site, node))
    add_operand_sites(regions, sites, names)
    for value, reason in find_shortcuts(regions).items():
        if reason is None:
            add_site(sites, _shortcut_site(sites[value.name, Role.ACTIVATION]))
    shared = {site.name: _shared_site(site, produced, sites) for site in sites.values()}
    for region in regions:
        if region.record.variadic and region.shares_qparams:
            _share_parameters([sites[value.name, Role.ACTIVATION].name for value in region.activations()], shared)
    share_buffer_parameters(buffers, sites, shared)
    share_iteration_parameters(graph, shared)
    return in_execution_order(graph, shared.values())


def add_operand_sites(regions: Iterable[Region], sites: dict[tuple[str, Role], Site], names: ValueNames) -> None:
    """Add the sites of dynamically quantized activations, weights and biases of regions to `sites`."""
    for site in dynamic_sites(regions, names.of):
        add_site(sites, site)
    for region in regions:
        _add_parameter_sites(region, sites, names)


def in_execution_order(graph: fx.Graph, sites: Iterable[Site]) -> tuple[Site, ...]:
    """Return the sites in execution order of their values."""
    order = {node.name: index for index, node in enumerate(graph.nodes)}
    rank = {Role.ACTIVATION: 0, Role.SHORTCUT: 1, Role.TOKEN: 2, Role.TENSOR: 2, Role.WEIGHT: 3, Role.BIAS: 4}
    return tuple(sorted(sites, key=lambda site: (order[site.value], rank[site.role])))


def signed_operands(regions: Sequence[Region], buffers: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Return the values that kernels read as signed, like weights, and all values that share parameters with them.

    These are the second operands of products of two activations, such as the keys and values of attention.
    """
    found: set[fx.Node] = set()
    for region in regions:
        if region.record.roles.weight is None and region.record.anchor and info(region.root).composite is None:
            values = operands(region.anchor)
            found.update(values[operand] for operand in region.record.roles.x[1:])
    alike = [{region.root, *region.activations()} for region in regions if region.shares_qparams]
    alike += [set(pair) for pair in buffers.items()]
    while joined := [values for values in alike if values & found and not values <= found]:
        found.update(*joined)
    return found


def as_signed(site: Site) -> Site:
    """Return the site with symmetric quantized values around 128, which kernels read as signed: 1..255 for 8 bits.

    int8 values are around 0 instead.
    """
    if not isinstance(site.spec, Observed) or site.dtype not in (DType.U8, DType.S8):
        return site
    half, center = (site.qmax - site.qmin) // 2, 0 if site.dtype is DType.S8 else SIGN_OFFSET
    return replace(site, spec=replace(site.spec, symmetric=True), qmin=center - half, qmax=center + half)


def _may_return_float(region: Region) -> bool:
    """Return whether the region may return floats: its dequantized accumulator, or the results of attention."""
    record, plain = region.record, len(region.nodes) == 1 or region.name == "product_number"
    return plain and record.anchor and (record.accumulates or record.recurrent or region.attends)


def _share_parameters(names: list[str], sites: dict[str, Site]) -> None:
    """Let the sites share the parameters of the first, as operands of a concatenation do.

    If a site already shares the parameters of another one, that one is changed instead.
    """
    for name in names[1:]:
        first, own = _parameter_owner(names[0], sites), _parameter_owner(name, sites)
        if own != first:
            sites[own] = replace(sites[own], spec=Shared(first, observed=isinstance(sites[first].spec, Observed)))


def _parameter_owner(name: str, sites: Mapping[str, Site]) -> str:
    """Return the site that holds the parameters, following `Shared` specs."""
    while isinstance(spec := sites[name].spec, Shared):
        name = spec.site
    return name


def share_buffer_parameters(
    buffers: Mapping[fx.Node, fx.Node], sites: Mapping[tuple[str, Role], Site], shared: dict[str, Site]
) -> None:
    """Let each buffer share the parameters of its value after a call; its initial contents are observed too."""
    for before, after in buffers.items():
        _share_parameters([sites[node.name, Role.ACTIVATION].name for node in (after, before)], shared)


def share_iteration_parameters(graph: fx.Graph, sites: dict[str, Site]) -> None:
    """Give an operator of an unrolled loop one range for all iterations, observed over all of them.

    An iteration keeps its own range if its site differs in spec or type from the first one's, for example because its
    value leaves the loop as the second operand of a product.
    """
    nodes = {node.name: node for node in graph.nodes}
    seen: Counter[Any] = Counter()
    first: dict[Any, str] = {}
    for site in list(sites.values()):
        node = nodes[site.value]
        iteration, kind = info(node).iteration, operator(node)
        if site.role != Role.ACTIVATION or iteration is None:
            continue
        number = seen[iteration, kind] = seen[iteration, kind] + 1  # A pass may replace one operator by several.
        partner = first.setdefault((iteration.position_in_body, kind, number), site.name)
        owners = [sites[_parameter_owner(name, sites)] for name in (partner, site.name)]
        alike = {(one.spec, one.dtype, one.qmin, one.qmax, one.axis) for one in owners}
        if len(alike) == 1 and isinstance(owners[0].spec, Observed) and not _selects(site):
            _share_parameters([partner, site.name], sites)


def _selects(site: Site) -> bool:
    """Return whether the values of a site are a selection of those of the site that it shares parameters with."""
    return isinstance(site.spec, Shared) and not site.spec.observed


def add_site(sites: dict[tuple[str, Role], Site], site: Site) -> None:
    """Add a site, unless there is one of the same value and role."""
    sites.setdefault((site.value, site.role), site)


def _with_model_qparams(site: Site, node: fx.Node) -> Site:
    """Return the site with the parameters of the model's own Q/DQ around the value, unless kernels need others."""
    q = dequantized_u8_qparams(node)
    if q is None or site.dtype is not DType.U8 or not isinstance(site.spec, Observed):
        return site
    if site.spec.symmetric and (q.zero, q.qmin + q.qmax) != (128, 256):
        return site
    return replace(site, spec=Fixed(q.step, q.zero), qmin=q.qmin, qmax=q.qmax, datatype="u8")


def _output_site(region: Region, names: ValueNames) -> Site:
    return activation_site(names.of(region.root), region.root, region.setting)


def activation_site(name: str, node: fx.Node, setting: Setting) -> Site:
    """Return the site of an activation; those of image pixels have fixed parameters, all others are observed."""
    if info(node).zero_points is not None:  # Pixels minus their zero points are quantized with scale 1.
        fixed = Fixed(1.0, info(node).zero_points)
        return Site(name, node.name, Role.ACTIVATION, fixed, DType.U8, 0, 255, 1, origin(node), "u8")
    if (known := info(node).fixed_parameters) is not None:
        return Site(name, node.name, Role.ACTIVATION, Fixed(*known), DType.U8, 0, 255, None, origin(node), "u8")
    kind = setting.activation
    assert setting.method is not None  # A decided recipe always has a method.
    spec = Observed("minmax" if kind.floating else setting.method, not kind.zero_point)
    return Site(
        name, node.name, Role.ACTIVATION, spec, kind.storage, kind.qmin, kind.qmax, None, origin(node), kind.name
    )


def _shortcut_site(site: Site) -> Site:
    """Return the 16-bit site of the same value."""
    low, high = numerics.QUANT_STEPS * site.qmin, numerics.QUANT_STEPS * site.qmax + numerics.QUANT_STEPS - 1
    return replace(
        site,
        name=f"{site.name}:shortcut",
        role=Role.SHORTCUT,
        spec=Derived((site.name,)),
        dtype=DType.U16,
        qmin=low,
        qmax=high,
    )


def _shared_site(site: Site, produced: Mapping[fx.Node, Region], sites: Mapping[tuple[str, Role], Site]) -> Site:
    """Return the site with the parameters of its region's input, if the region does not change them."""
    region = next((r for node, r in produced.items() if node.name == site.value), None)
    if site.role != Role.ACTIVATION or region is None or not region.shares_qparams:
        return site
    partner = sites[region.activations()[0].name, Role.ACTIVATION]
    return replace(partner, name=site.name, value=site.value, spec=Shared(partner.name), origin=site.origin)


def _add_parameter_sites(region: Region, sites: dict[tuple[str, Role], Site], names: ValueNames) -> None:
    """Add the weight and bias sites of an anchor: one for each weight tensor, one bias for each call."""
    record = region.record
    for site in recurrent_weight_sites(region.anchor, names.weight) if record.recurrent else ():
        add_site(sites, site)
    if record.roles.weight is None:
        return
    x, weight, bias = layer_operands(region.anchor)
    per_channel, kind = region.setting.weights != WeightScales.TENSOR, region.setting.weight
    group = group_of(origin(region.anchor), region.setting, record.roles.outputs)
    low, high = kind.stored(group)
    weight_site = Site(
        names.weight(weight),
        weight.name,
        Role.WEIGHT,
        Observed("absmax", True),
        kind.storage,
        low,
        high,
        record.roles.outputs if per_channel else None,
        origin(region.anchor),
        kind.name,
        group,
    )
    add_site(sites, weight_site)
    if region.dynamic or bias is None:
        return
    if sites[weight.name, Role.WEIGHT].native and sites[x.name, Role.ACTIVATION].native:
        sources = (sites[x.name, Role.ACTIVATION].name, sites[weight.name, Role.WEIGHT].name)
        add_site(
            sites,
            Site(
                f"{names.of(region.anchor)}:bias",
                region.anchor.name,
                Role.BIAS,
                Derived(sources),
                DType.I32,
                -(2**31),
                2**31 - 1,
                0 if per_channel else None,
                origin(region.anchor),
            ),
        )


class ValueNames:
    """Stable names of values: ``module.path#call/operator.number``.

    The number counts equal operators of one module call, quantized or not, so a name does not depend on the recipe.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._weights: dict[str, fx.Node] = {}
        self._known: dict[fx.Node, str] = {}
        count: dict[str, int] = {}
        for node in (node for node in graph.nodes if node.op == "call_function"):
            if (source := _source(node)) is not node:
                continue
            stem = _stem(source)
            number = count[stem] = count.get(stem, -1) + 1
            self._known[node] = f"{stem}.{number}"

    def of(self, node: fx.Node) -> str:
        """Return the name of a value; that of a buffer is its path in the model."""
        source = _source(node)
        if info(source).buffer is not None:
            return str(info(source).buffer)
        if source.op == "placeholder":
            return f"#0/input.{source.name}"
        return self._known.get(source) or f"{_stem(source)}.0"  # Constants have no count.

    def weight(self, node: fx.Node) -> str:
        """Return the parameter's name.

        The suffix ``@1`` marks another tensor made from it, as when two calls fold different batch norms into it.
        """
        path = info(node).path or str(node.target)
        name, number = path, 0
        while self._weights.setdefault(name, node) is not node:
            number += 1
            name = f"{path}@{number}"
        return name


def _source(node: fx.Node) -> fx.Node:
    """Return the original value of a node that holds image pixels, or a value divided by factors."""
    return node.args[1] if info(node).zero_points is not None or info(node).divides_by_smoothing else node


def _stem(node: fx.Node) -> str:
    """Return the name of a value without its number: ``module.path#call/operator``."""
    path, _, call = origin(node).path.partition("@")
    part = info(node).part
    written = origin(node).operator if part is None else part.operator
    kind = written.split(".")[1] if "." in written else getattr(node.target, "__name__", str(node.target))
    label = f":{part.label}" if part is not None and part.label else ""
    return f"{path}#{call or 0}/{kind}{label}"
