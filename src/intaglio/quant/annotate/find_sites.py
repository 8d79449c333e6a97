"""The values that carry parameters, by name: activations, operands of anchors, what shares with what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import info, origin
from intaglio.fxgraph.nodes import layer_operands, operands, operator
from intaglio.ir import DType
from intaglio.quant.annotate.find_regions import find_shortcuts
from intaglio.quant.annotate.per_token import row_sites
from intaglio.quant.annotate.recurrent_sites import weight_sites
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Derived, Fixed, Observed, Shared, Site
from intaglio.quant.qdq.qdq_normalize import levels_behind
from intaglio.quant.qdq.weight_grid import group_of
from intaglio.quant.recipes.choices import Role, WeightScales
from intaglio.quant.recipes.settings import Setting


def sites_of(
    graph: fx.Graph,
    regions: tuple[Region, ...],
    returned: Mapping[fx.Node, Setting],
    buffers: Mapping[fx.Node, fx.Node],
) -> tuple[Site, ...]:
    """``returned``: values that leave as levels, and their settings. ``buffers``: those kept as levels -> what they are
    after a call; both are among ``returned``."""
    names = Names(graph)
    produced = {region.root: region for region in regions}
    static = [region for region in regions if not region.dynamic]
    wanted = {value: region for region in reversed(static) for value in region.activations()}
    sites: dict[tuple[str, Role], Site] = {}
    symmetric = second_factors(regions, buffers)
    for node in graph.nodes:
        if node in produced and (node in wanted or node in returned or not _may_give_float(produced[node])):
            site = _output_site(produced[node], names)
        elif (node in wanted or node in returned) and node not in produced:
            site = activation_site(names.of(node), node, wanted[node].setting if node in wanted else returned[node])
        else:
            continue
        put(sites, _as_given(around_zero(site) if node in symmetric else site, node))
    operand_sites(regions, sites, names)
    for value, reason in find_shortcuts(regions).items():
        if reason is None:
            put(sites, _shortcut(sites[value.name, Role.ACTIVATION]))
    shared = {site.name: _share(site, produced, sites) for site in sites.values()}
    for region in regions:
        if region.record.variadic and region.shares:
            _join([sites[value.name, Role.ACTIVATION].name for value in region.activations()], shared)
    join_buffers(buffers, sites, shared)
    join_iterations(graph, shared)
    return in_order(graph, shared.values())


def operand_sites(regions: Iterable[Region], sites: dict[tuple[str, Role], Site], names: Names) -> None:
    """Of rows, weights and biases."""
    for site in row_sites(regions, names.of):
        put(sites, site)
    for region in regions:
        _parameters(region, sites, names)


def in_order(graph: fx.Graph, sites: Iterable[Site]) -> tuple[Site, ...]:
    order = {node.name: index for index, node in enumerate(graph.nodes)}
    rank = {Role.ACTIVATION: 0, Role.SHORTCUT: 1, Role.TOKEN: 2, Role.TENSOR: 2, Role.WEIGHT: 3, Role.BIAS: 4}
    return tuple(sorted(sites, key=lambda site: (order[site.value], rank[site.role])))


def second_factors(regions: Sequence[Region], buffers: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """What kernels read as they read weights, keys and values of attention among it, and all that shares parameters
    with that."""
    found: set[fx.Node] = set()
    for region in regions:
        if region.record.roles.weight is None and region.record.anchor and info(region.root).composite is None:
            values = operands(region.anchor)
            found.update(values[operand] for operand in region.record.roles.x[1:])
    alike = [{region.root, *region.activations()} for region in regions if region.shares]
    alike += [set(pair) for pair in buffers.items()]
    while joined := [values for values in alike if values & found and not values <= found]:
        found.update(*joined)
    return found


def around_zero(site: Site) -> Site:
    """With levels around 128, which kernels read as signed ones: 1..255, or as many as fewer bits have."""
    if not isinstance(site.spec, Observed) or site.dtype is not DType.U8:
        return site
    half = (site.qmax - site.qmin) // 2
    return replace(site, spec=replace(site.spec, symmetric=True), qmin=128 - half, qmax=128 + half)


def _may_give_float(region: Region) -> bool:
    """Whether an accumulator may leave the region dequantized."""
    plain = len(region.nodes) == 1 or region.name == "product_number"
    return plain and region.record.anchor and (region.record.accumulates or region.record.recurrent)


def _join(names: list[str], sites: dict[str, Site]) -> None:
    """The operands of a concatenation share parameters, as a buffer does with what it becomes: the owners behind all of
    them follow the first."""
    for name in names[1:]:
        first, own = _owner(names[0], sites), _owner(name, sites)
        if own != first:
            sites[own] = replace(sites[own], spec=Shared(first, observed=isinstance(sites[first].spec, Observed)))


def _owner(name: str, sites: Mapping[str, Site]) -> str:
    """The site whose parameters it has in the end."""
    while isinstance(spec := sites[name].spec, Shared):
        name = spec.site
    return name


def join_buffers(
    buffers: Mapping[fx.Node, fx.Node], sites: Mapping[tuple[str, Role], Site], shared: dict[str, Site]
) -> None:
    """A buffer has the parameters of what it is after a call, and both count: what it held at first among it."""
    for before, after in buffers.items():
        _join([sites[node.name, Role.ACTIVATION].name for node in (after, before)], shared)


def join_iterations(graph: fx.Graph, sites: dict[str, Site]) -> None:
    """What an operator in the body of a loop gives has one range for all iterations, and all of them count. Where the
    levels of an iteration are of another kind (its value leaves the loop as a second factor) it keeps its own."""
    nodes = {node.name: node for node in graph.nodes}
    seen: Counter[Any] = Counter()
    first: dict[Any, str] = {}
    for site in list(sites.values()):
        node = nodes[site.value]
        turn, kind = info(node).turn, operator(node)
        if site.role != Role.ACTIVATION or turn is None:
            continue
        number = seen[turn, kind] = seen[turn, kind] + 1  # of those that a pass has put in place of one operator
        partner = first.setdefault((turn.place, kind, number), site.name)
        owners = [sites[_owner(name, sites)] for name in (partner, site.name)]
        alike = {(one.spec, one.dtype, one.qmin, one.qmax, one.axis) for one in owners}
        if len(alike) == 1 and isinstance(owners[0].spec, Observed) and not _selects(site):
            _join([partner, site.name], sites)


def _selects(site: Site) -> bool:
    """Whether its values are among those of the site that it shares parameters with."""
    return isinstance(site.spec, Shared) and not site.spec.observed


def put(sites: dict[tuple[str, Role], Site], site: Site) -> None:
    sites.setdefault((site.value, site.role), site)


def _as_given(site: Site, node: fx.Node) -> Site:
    """A value that is levels already keeps them, but where a kernel needs others."""
    q = levels_behind(node)
    if q is None or site.dtype is not DType.U8 or not isinstance(site.spec, Observed):
        return site
    if site.spec.symmetric and (q.zero, q.qmin + q.qmax) != (128, 256):
        return site
    return replace(site, spec=Fixed(q.step, q.zero), qmin=q.qmin, qmax=q.qmax, datatype="u8")


def _output_site(region: Region, names: Names) -> Site:
    return activation_site(names.of(region.root), region.root, region.setting)


def activation_site(name: str, node: fx.Node, setting: Setting) -> Site:
    if info(node).zero_points is not None:  # pixels less their zero points: the levels are bytes
        fixed = Fixed(1.0, info(node).zero_points)
        return Site(name, node.name, Role.ACTIVATION, fixed, DType.U8, 0, 255, 1, origin(node), "u8")
    kind = setting.activation
    assert setting.method is not None  # a recipe leaves no question open
    spec = Observed("minmax" if kind.floating else setting.method, not kind.zero_point)
    return Site(
        name, node.name, Role.ACTIVATION, spec, kind.storage, kind.qmin, kind.qmax, None, origin(node), kind.name
    )


def _shortcut(site: Site) -> Site:
    """The same value in 16 bits."""
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


def _share(site: Site, produced: Mapping[fx.Node, Region], sites: Mapping[tuple[str, Role], Site]) -> Site:
    region = next((r for node, r in produced.items() if node.name == site.value), None)
    if site.role != Role.ACTIVATION or region is None or not region.shares:
        return site
    partner = sites[region.activations()[0].name, Role.ACTIVATION]
    return replace(partner, name=site.name, value=site.value, spec=Shared(partner.name), origin=site.origin)


def _parameters(region: Region, sites: dict[tuple[str, Role], Site], names: Names) -> None:
    """Weight and bias sites of an anchor: one per weight tensor, one bias per call."""
    record = region.record
    for site in weight_sites(region.anchor, names.weight) if record.recurrent else ():
        put(sites, site)
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
    put(sites, weight_site)
    if region.dynamic or bias is None:
        return
    if sites[weight.name, Role.WEIGHT].native and sites[x.name, Role.ACTIVATION].native:
        sources = (sites[x.name, Role.ACTIVATION].name, sites[weight.name, Role.WEIGHT].name)
        put(
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


class Names:
    """``module.path#call/operator.number``: number counts equal operators of one module call, sites or not, so that a
    value is called the same whatever a recipe leaves in float."""

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
        source = _source(node)
        if info(source).buffer is not None:
            return str(info(source).buffer)
        if source.op == "placeholder":
            return f"#0/input.{source.name}"
        return self._known.get(source) or f"{_stem(source)}.0"  # constants have names of their own

    def weight(self, node: fx.Node) -> str:
        """The parameter's name; ``@1`` marks another tensor made from it (calls that fold different batch norms)."""
        path = info(node).path or str(node.target)
        name, number = path, 0
        while self._weights.setdefault(name, node) is not node:
            number += 1
            name = f"{path}@{number}"
        return name


def _source(node: fx.Node) -> fx.Node:
    """The value that a node holds in another form: pixels, or what was divided by factors."""
    return node.args[1] if info(node).zero_points is not None or info(node).smooths else node


def _stem(node: fx.Node) -> str:
    path, _, call = origin(node).path.partition("@")
    written = origin(node).operator
    kind = written.split(".")[1] if "." in written else getattr(node.target, "__name__", str(node.target))
    return f"{path}#{call or 0}/{kind}"
