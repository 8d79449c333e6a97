"""Parameters that a calibration callback returns for the sites of a region, checked and completed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from intaglio import numerics
from intaglio.argument_checks import value_text
from intaglio.errors import CalibrationError
from intaglio.fxgraph.node_info import fixed_size
from intaglio.fxgraph.nodes import layer_operands
from intaglio.ir import QParams
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Fixed, Observed, Site
from intaglio.quant.recipes.choices import Role

Given = QParams | tuple[Any, Any]
"""Parameters that a callback returns for a site: `QParams`, (low, high), or (scale, zero point).

A pair is (scale, zero point) if the second entry is an integer and the first one is above 0. It is (low, high) if the
first entry is at most 0, as every range contains 0. Any other pair is refused, because a zero point that NumPy computed
as a float would look like a range. For weights, the entries may be arrays with one element for each channel.
"""
FORMS = "return (scale, zero point) with an integer zero point, int(zero_point), or (low, high) with low at most 0"


@dataclass(frozen=True)
class RegionSites:
    """Names of a region's sites; ``output`` is ``None`` if the region returns float."""

    inputs: tuple[str, ...]
    weight: str | None
    bias: str | None
    output: str | None

    def __iter__(self) -> Iterator[str]:
        return (name for name in (*self.inputs, self.weight, self.bias, self.output) if name is not None)


def parameters_by_site(given: Any, pattern: str, sites: RegionSites) -> Mapping[str, Given]:
    """Return what a callback returned.

    Args:
        given: the result of the callback.
        pattern: name of the pattern that the callback belongs to.
        sites: the sites of the region. A callback may choose the parameters of all but the bias.

    Raises:
        CalibrationError: it is not a mapping, or has a name that is not one of these sites.
    """
    where, free = f"callback of pattern {pattern!r}", [name for name in sites if name != sites.bias]
    if not isinstance(given, Mapping):
        problem = f"it returned {value_text(given)}; it must return a dictionary from site name to parameters"
        remedy = f"return {{}} to choose nothing, or parameters by name for {', '.join(free)}"
        raise CalibrationError(where, None, problem, remedy=remedy)
    for name in given:
        if name not in free:
            bias = "a bias, whose scale follows from its input and weight"
            what = bias if name == sites.bias else "not a site of the region"
            remedy = f"return parameters for {', '.join(free)}"
            raise CalibrationError(where, None, f"{name!r} is {what}", remedy=remedy)
    return given


def given_parameters(site: Site, value: Given, region: Region) -> QParams:
    """Return the complete parameters of a site from those that a callback chose.

    Raises:
        CalibrationError: for parameters that the site cannot have.
    """
    if isinstance(site.spec, Fixed):
        problem = "its parameters are fixed, because it holds bytes of images"
        raise CalibrationError(site.name, site.origin.operator, problem, remedy="return no parameters for it")
    try:
        found = _whole(value) if isinstance(value, QParams) else _qparams_of_pair(site, *_pair(value))
    except (ValueError, TypeError, RuntimeError) as error:  # of NumPy, or of a tensor that has no array
        problem = f"the callback returned {value_text(value)}: {error}"
        raise CalibrationError(site.name, site.origin.operator, problem, remedy=FORMS) from error
    zero = _only_zero_point(site)
    fits = (found.qmin, found.qmax) == (site.qmin, site.qmax) and found.axis in (None, site.axis)
    if not fits or (zero is not None and set(found.zeros) != {zero}):
        raise CalibrationError(
            site.name,
            site.origin.operator,
            f"the callback returned {found} in [{found.qmin}, {found.qmax}], which do not fit the site {site}",
            remedy="return a pair of scale and zero point "
            + (f"in {site.qmin}..{site.qmax}" if zero is None else f"{zero}, or a range"),
        )
    if site.role == Role.WEIGHT and isinstance(site.axis, int):
        return _for_each_channel(found, site, fixed_size(layer_operands(region.anchor).weight, site.axis))
    return found


def _only_zero_point(site: Site) -> int | None:
    """Return the zero point that a weight or a symmetric activation must have; ``None`` if it may have any."""
    if site.role == Role.WEIGHT:
        return 0
    symmetric = isinstance(site.spec, Observed) and site.spec.symmetric
    return numerics.symmetric_zero_point(site.qmin, site.qmax) if symmetric else None


def _for_each_channel(found: QParams, site: Site, channels: int) -> QParams:
    """Return the parameters of a weight with one scale for each of its channels."""
    if len(found.scales) not in (1, channels):
        problem = f"the callback returned {len(found.scales)} scales, but the weight has {channels} channels"
        raise CalibrationError(
            site.name, site.origin.operator, problem, remedy="return one scale, or one for each channel"
        )
    if len(found.scales) == 1:
        return replace(found, scale=tuple(found.scales) * channels, zero_point=(0,) * channels, axis=site.axis)
    return found


def _whole(found: QParams) -> QParams:
    """Return parameters whose zero points are integers; raise ValueError for others."""
    if all(isinstance(zero, int) for zero in found.zeros):
        return found
    raise ValueError("a zero point must be an integer")


def _pair(value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return a pair as two arrays of finite numbers; raise ValueError for anything else."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError("the parameters of a site are a pair of numbers")
    first, second = (np.asarray(part).reshape(-1) for part in value)
    if not all(part.size and part.dtype.kind in "iuf" and np.isfinite(part).all() for part in (first, second)):
        raise ValueError("its entries must be finite numbers")
    return first, second


def _is_scale_and_zero_point(site: Site, first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether a pair looks like a float scale and an integer zero point of the site, and not like a range."""
    if not (np.issubdtype(first.dtype, np.floating) and np.issubdtype(second.dtype, np.integer)):
        return False
    return site.role == Role.WEIGHT or bool(second.any() and ((site.qmin <= second) & (second <= site.qmax)).all())


def _qparams_of_pair(site: Site, first: np.ndarray, second: np.ndarray) -> QParams:
    """Return the parameters for a pair from a callback; raise ValueError for one that the site cannot have."""
    if first.min() <= 0 and _is_scale_and_zero_point(site, first, second):
        raise ValueError("a scale must be above 0, and the ends of a range are two floats or two integers")
    if first.min() > 0:
        if not np.issubdtype(second.dtype, np.integer):
            raise ValueError("a zero point must be an integer, and the low end of a range is at most 0")
        scales = tuple(float(np.float32(scale)) for scale in first)
        zeros = tuple(int(zero) for zero in np.broadcast_to(second, first.shape))
    elif site.role == Role.WEIGHT:
        scales = tuple(map(float, numerics.symmetric_scale(np.maximum(np.abs(first), np.abs(second)), site.qmax)))
        zeros = (0,) * len(scales)
    else:
        if first.size != 1 or second.size != 1 or not first[0] <= second[0]:
            raise ValueError("a range must be a low and a high number")
        low, high = float(first[0]), max(float(second[0]), 0.0)
        if _only_zero_point(site) is None:
            scale, zero = numerics.affine_qparams(low, high, site.qmin, site.qmax)
        else:
            scale, zero = numerics.symmetric_qparams(max(-low, high), site.qmin, site.qmax)
        scales, zeros = (scale,), (zero,)
    if any(not site.qmin <= zero <= site.qmax for zero in zeros):
        raise ValueError(f"a zero point is outside [{site.qmin}, {site.qmax}]")
    return QParams(scales, zeros, site.qmin, site.qmax, site.axis if len(scales) > 1 else None)
