"""Values that 256 quantized values represent too coarsely, and the operators that compute from them in float."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial

from torch import fx

from intaglio.fxgraph.connected_values import following_values
from intaglio.fxgraph.float_forms import has_program_form
from intaglio.fxgraph.node_info import info, origin
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.annotate.sites import Site
from intaglio.quant.precision.float_results import can_return_float, inside_products
from intaglio.quant.recipes.choices import Role

MOST_FOLLOWERS = 64
"""Largest number of operators behind a value in which the effect of its rounding is measured."""


@dataclass(frozen=True)
class MeasuredValue:
    """A quantized value that readers of floats could get without rounding.

    Attributes:
        node: the node that computes it.
        site: its site.
        followers: the operators that compute from it in front of the next layers and products, in execution order.
        ends: those of the followers, and the value itself, whose results layers, products or floats read.
    """

    node: fx.Node
    site: Site
    followers: tuple[fx.Node, ...]
    ends: tuple[fx.Node, ...]


def measured_values(annotations: Annotations) -> list[MeasuredValue]:
    """Return the quantized values whose rounding could be left out for some readers."""
    module = annotations.module
    sites, regions = annotations.by_value, annotations.regions
    member = {node: region for region in regions for node in region.computed}
    stops, order = inside_products(regions), {node: place for place, node in enumerate(module.graph.nodes)}
    forms = cache(partial(has_program_form, module=module))
    found = []
    for region in regions:
        site = sites.get((region.root.name, Role.ACTIVATION))
        if site is None or region.root.name in annotations.outputs or region.unrounded or region.dynamic:
            continue
        if not can_return_float(region, forms) or not _rounds_for_others(region, member):
            continue
        behind = following_values([region.root], lambda node: node not in stops and forms(node))
        followers = tuple(sorted(behind - {region.root}, key=order.__getitem__))[:MOST_FOLLOWERS]
        ends = tuple(node for node in (region.root, *followers) if _is_end(node, region.root, followers, member))
        if ends:
            found.append(MeasuredValue(region.root, site, followers, ends))
    return found


def _rounds_for_others(region: Region, member: Mapping[fx.Node, Region]) -> bool:
    """Return whether its kernel can give floats to some readers even if a layer or product reads the result.

    A layer without a function behind it gives either floats or quantized values to all of them.
    """
    if not region.record.accumulates or region.returning_float().float_tail:
        return True
    readers = [member.get(user) for user in region.root.users]
    return all(reader is None or not reader.record.anchor for reader in readers)


def _is_end(node: fx.Node, value: fx.Node, followers: Collection[fx.Node], member: Mapping[fx.Node, Region]) -> bool:
    """Return whether the effect of rounding a value is measured at a node.

    It is not measured at the value itself for layers and products that read it, because these read quantized values in
    any case. If a concatenation and others read a value, it is measured in front of the concatenation, whose scale the
    others should not get.
    """
    readers = [user for user in node.users if info(user).dim is None]
    if node is value:
        joined = [user in member and member[user].record.variadic and member[user].shares_qparams for user in readers]
        return any(joined) != all(joined) or any(user not in member and user not in followers for user in readers)
    return any(user not in followers for user in readers)


def notes_on_coarse_values(found: Mapping[fx.Node, float]) -> tuple[str, ...]:
    """Return a note on the values that stay in float because of their signal-to-noise ratios in decibels."""
    if not found:
        return ()
    listed = listed_ratios((origin(node).operator or node.name, ratio) for node, ratio in found.items())
    return (
        "not rounded for readers of floats, because 256 quantized values would leave too little signal to noise of "
        f"what is computed from them: {listed}",
    )


def listed_ratios(found: Iterable[tuple[str, float]]) -> str:
    """Return operators with their signal-to-noise ratios in decibels as text, such as ``exp (2 x 3.0 to 7.5 dB)``."""
    ratios: dict[str, list[float]] = {}
    for name, ratio in found:
        ratios.setdefault(name, []).append(ratio)
    return ", ".join(f"{name} ({_span(values)})" for name, values in sorted(ratios.items()))


def _span(values: list[float]) -> str:
    """Return decibels as text: one number, or how many there are with the lowest and the highest."""
    low, high = min(values), max(values)
    return f"{low:.1f} dB" if len(values) == 1 else f"{len(values)} x {low:.1f} to {high:.1f} dB"
