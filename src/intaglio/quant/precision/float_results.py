"""Results of quantized regions that readers of floats get without rounding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from intaglio.fxgraph.connected_values import connected_values, following_values
from intaglio.fxgraph.node_info import info
from intaglio.quant.annotate.find_regions import find_shortcuts
from intaglio.quant.annotate.regions import DataFloats, Region
from intaglio.quant.recipes.choices import FloatResults

HasForm = Callable[[fx.Node], bool]


@dataclass(frozen=True)
class FloatForms:
    """Operators that a program computes between floats.

    Attributes:
        elementwise: tells whether it computes an operator element by element in float32, or moves its data.
        any: tells whether it computes an operator in float32, with sums over axes and in pools too.
    """

    elementwise: HasForm
    any: HasForm


def float_results(
    regions: Sequence[Region],
    returned: Collection[fx.Node],
    forms: FloatForms,
    data_floats: DataFloats,
) -> frozenset[fx.Node]:
    """Return the results of quantized regions that their readers of floats get without rounding to 256 values.

    These are the results that only such readers have, and those behind convolutions, linear layers and products that
    are results of the model too: their kernel stores floats and quantized values.

    The values that a region reads are not rounded for it either if its result is not, except for the operands of a
    convolution, linear layer or product. So whole chains of operators in front of a result of the model stay in float.
    An operator that only selects or clamps values that are rounded anyway remains quantized. Results of attention
    are not among them, because its own kernel stores them as floats.

    Args:
        regions: the quantized regions, in execution order.
        returned: values that leave the model quantized.
        forms: the operators that a program computes between floats.
        data_floats: values that stay in float because of the data, whatever the recipe says about results:
            concatenations with what is connected to them, and coarse values with what is computed from them.
    """
    if not regions:
        return frozenset()
    wanted, found, rounded = set(returned), set[fx.Node](), set[fx.Node]()
    connected = connected_values(regions[0].root.graph, data_floats.concatenations)
    coarse = coarse_results(regions, data_floats)
    makers = {region.root: region for region in regions}
    wide = {value for value, reason in find_shortcuts(regions).items() if reason is None}
    for region in (region for region in reversed(regions) if not region.dynamic):
        if region.attends and region.root not in wanted and region.setting.results == FloatResults.FLOAT:
            wanted.update(region.activations())
            continue
        product = region.record.accumulates
        twice = bool(region.returning_float().float_tail) if product else _follows_layer(region, makers)
        twice = twice and region.root not in {*wide, *returned}
        twice = twice and any(user.op == "output" for user in region.root.users)
        is_coarse = region.root in coarse and region.root not in {*wide, *returned}
        is_float = region.root not in wanted or twice or is_coarse
        chosen = is_coarse or region.root in connected or region.setting.results == FloatResults.FLOAT
        if not (is_float and chosen and can_return_float(region, forms.any if is_coarse else forms.elementwise)):
            wanted.update(region.activations())
            rounded.add(region.root)
            continue
        if product:
            wanted.update(region.returning_float().activations())
        if not product or region.returning_float().float_tail:
            found.add(region.root)
    for region in regions:
        if region.root.name in data_floats.concatenations or region.root in coarse:
            continue
        if region.root in found and region.shares_qparams and rounded.issuperset(region.activations()):
            found.remove(region.root)
            rounded.add(region.root)
    return frozenset(found)


def coarse_results(regions: Sequence[Region], data_floats: DataFloats) -> frozenset[fx.Node]:
    """Return the coarse values, and those computed from them outside of the kernels of layers and products."""
    stops = inside_products(regions)
    named = [region.root for region in regions if region.root.name in data_floats.coarse]
    return following_values(named, lambda node: node not in stops)


def inside_products(regions: Iterable[Region]) -> frozenset[fx.Node]:
    """Return the operators that run in the kernels of layers and products."""
    return frozenset(node for region in regions if region.record.anchor for node in region.computed)


def _follows_layer(region: Region, makers: Mapping[fx.Node, Region]) -> bool:
    """Return whether a region is a function that the kernel of the layer in front of it can compute."""
    if len(region.nodes) > 1 or region.record.precise is None:
        return False
    (value,) = region.activations()
    maker = makers.get(value)
    return maker is not None and len(maker.nodes) == 1 and maker.record.multiplies_weight and len(value.users) == 1


def can_return_float(region: Region, has_float_form: HasForm) -> bool:
    """Return whether no pattern wants a region quantized, and a program computes its operators in float32.

    The anchor of the region is an exception: its accumulator is dequantized.
    """
    pattern = region.pattern
    if pattern is not None and pattern.quantize_always:
        return False
    if info(region.root).composite is not None or (region.record.anchor and not region.record.accumulates):
        return False
    return all(has_float_form(node) for node in region.nodes[region.record.accumulates :])


def leave_float(
    regions: Iterable[Region],
    floats: Collection[fx.Node],
    reasons: dict[fx.Node, str | None],
    data_floats: DataFloats,
) -> tuple[Region, ...]:
    """Return the regions whose results are quantized, and those that return the accumulator of a product as floats.

    The other regions with a result in `floats` get the reason why they stay in float: the recipe or the data.
    """
    regions, kept = list(regions), []
    coarse = coarse_results(regions, data_floats)
    for region in regions:
        if region.root not in floats:
            kept.append(region)
        elif region.record.accumulates:
            kept.append(region.returning_float())
        else:
            reasons.update(dict.fromkeys(region.nodes, _reason(region, coarse, data_floats)))
    return tuple(kept)


def _reason(region: Region, coarse: Collection[fx.Node], data_floats: DataFloats) -> str:
    """Return why a region that could be quantized stays in float."""
    name = region.root.name
    if name in data_floats.coarse:
        return too_coarse(data_floats.coarse[name])
    if name in data_floats.concatenations:
        return DIFFERENT_RANGES
    if region.root in coarse:
        return BEHIND_COARSE
    return ONLY_READ_AS_FLOATS if region.setting.results == FloatResults.FLOAT else BESIDE_DIFFERENT_RANGES


def float_layer_reasons(regions: Iterable[Region], data_floats: DataFloats) -> dict[fx.Node, str]:
    """Return the operators of the first layers that stay in float because of the data, with the reason."""
    ratios = data_floats.layers
    named = [region for region in regions if region.anchor.name in ratios]
    return {node: costly_operand(ratios[region.anchor.name]) for region in named for node in region.nodes}


def costly_operand(ratio: float) -> str:
    """Return the reason why a first layer stays in float, from the ratio in decibels that its operand would leave."""
    return f"its operand alone, rounded to 256 values, would leave {ratio:.1f} dB in the results of the model"


def too_coarse(ratio: float) -> str:
    """Return the reason why a value stays in float, from its signal-to-noise ratio in decibels as quantized values."""
    return f"256 quantized values would leave {ratio:.1f} dB of what is computed from it"


ONLY_READ_AS_FLOATS = 'results = "float" leaves what is only read as floats in float'
DIFFERENT_RANGES = "its operands have ranges too different for one scale"
BESIDE_DIFFERENT_RANGES = "it belongs to a concatenation whose operands have ranges too different for one scale"
BEHIND_COARSE = "it computes from a value that 256 quantized values represent too coarsely"
