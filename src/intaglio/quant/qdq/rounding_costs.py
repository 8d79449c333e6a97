"""Say what it costs that values are rounded to 256 quantized values although operators in float read them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from intaglio.fxgraph.node_info import info, origin
from intaglio.fxgraph.nodes import is_constant, operator
from intaglio.ir import DType, QParams
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.calibrate.range_methods import rounding_decibels
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.precision.coarse_values import listed_ratios
from intaglio.quant.recipes.choices import FloatResults, Role


def rounding_costs(
    annotations: Annotations, qparams: Mapping[str, QParams], statistics: Mapping[str, Statistics]
) -> tuple[str, ...]:
    """Return a note on the values that are rounded although a result of the model or a float operator reads them.

    Args:
        annotations: the annotated graph.
        qparams: parameters of its sites.
        statistics: statistics of calibration by site; values without are left out.
    """
    found: list[tuple[str, float]] = []
    for region in annotations.regions:
        site = annotations.by_value.get((region.root.name, Role.ACTIVATION))
        if site is None or region.unrounded or region.setting.results != FloatResults.FLOAT:
            continue
        seen = statistics.get(annotations.leaders[site.name])
        if seen is None or not seen.count or site.dtype is not DType.U8 or qparams[site.name].axis is not None:
            continue
        if site.value not in annotations.outputs and _has_float_reader(region.root, annotations):
            name = origin(region.root).operator or operator(region.root)
            found.append((name, rounding_decibels(seen, qparams[site.name])))
    if not found:
        return ()
    return (f"rounded to 256 values although floats are read, with signal to noise of: {listed_ratios(found)}",)


def _has_float_reader(value: fx.Node, annotations: Annotations) -> bool:
    """Return whether the model returns a value, or an operator reads it that takes no quantized values."""
    quantized = {node for region in annotations.regions if not region.dynamic for node in region.nodes}
    readers = [user for user in value.users if info(user).dim is None and not is_constant(user)]
    return any(user not in quantized for user in readers)
