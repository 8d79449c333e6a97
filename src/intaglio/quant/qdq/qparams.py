"""Computation of scales and zero points from ranges and weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from intaglio import numerics
from intaglio.errors import CalibrationError, UnsupportedError
from intaglio.fxgraph.node_info import origin
from intaglio.fxgraph.nodes import call_of, layer_operands
from intaglio.ir import QParams
from intaglio.ops.products.conv import outputs_first
from intaglio.quant.annotate.regions import Annotations, Chain, Region
from intaglio.quant.annotate.sites import Derived, Fixed, Observed, Site
from intaglio.quant.calibrate.data_checks import softmax_operands
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.calibrate.range_methods import channel_ranges, method_of, without_mask
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.calibrate.tensor_statistics import Range, Statistics
from intaglio.quant.correct.corrections import RoundedWeight
from intaglio.quant.qdq.row_blocks import by_row_blocks
from intaglio.quant.qdq.weight_grid import channel_scales
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.datatypes import INT32_RANGE, Datatype


def chosen_by_callbacks(annotations: Annotations, ranges: Ranges | None) -> Mapping[str, QParams]:
    """Return the parameters that calibration callbacks chose.

    Raises:
        CalibrationError: a pattern has a callback that was not called.
    """
    asked = {region.pattern.name for region in annotations.regions if region.pattern and region.pattern.calibration}
    if asked and (ranges is None or ranges.parameters is None):
        raise CalibrationError(
            f"pattern {min(asked)!r}",
            None,
            "its calibration callback was not called",
            remedy="call ranges = intaglio.stages.calibrate(prepared, data), then convert(prepared, ranges)",
        )
    return (ranges.parameters if ranges else None) or {}


def activation_qparams(prepared: Prepared, ranges: Ranges | None) -> dict[str, QParams]:
    """Return the parameters of every activation and shortcut site, shared ones included.

    Raises:
        CalibrationError: the ranges belong to another model, or a site has seen no data.
    """
    found = ranges.statistics if ranges else {name: o.statistics for name, o in prepared.observers.items()}
    if set(found) != set(prepared.observers):
        odd = sorted(set(found) ^ set(prepared.observers))
        problem = f"they belong to another model: only one of the two has the sites {', '.join(odd[:5])}"
        raise CalibrationError("ranges", None, problem, remedy=CALIBRATE_AGAIN)
    if ranges and ranges.graph not in ("", prepared.fingerprint):
        problem = "they belong to another model, with other operators between these sites"
        raise CalibrationError("ranges", None, problem, remedy=CALIBRATE_AGAIN)
    fixed = (ranges.parameters if ranges else None) or {}
    fixed = {n: q for n, o in prepared.observers.items() if (q := o.custom_qparams()) is not None} | dict(fixed)
    unseen = [name for name in prepared.observers if not found[name].count and name not in fixed]
    if unseen:
        raise CalibrationError(
            ", ".join(unseen[:5]),
            None,
            f"{len(unseen)} of {len(found)} sites have seen no data",
            remedy="calibrate first: calibrate(prepared, data), or run prepared(batch); leave operators that no data "
            "reaches in float: skip=...",
        )
    by_name = {site.name: site for site in prepared.annotations.sites}
    chosen = activation_ranges(prepared, found)
    result = {}
    for site in by_name.values():
        if site.role == Role.ACTIVATION:
            leader = by_name[prepared.annotations.leaders[site.name]]
            if leader.name not in result:
                result[leader.name] = fixed.get(leader.name) or _activation(leader, chosen)
            result[site.name] = result[leader.name]
    activations = {site.name: result[site.name] for site in by_name.values() if site.role == Role.ACTIVATION}
    return activations | {
        site.name: shortcut_qparams(site, activations) for site in by_name.values() if site.role == Role.SHORTCUT
    }


def shortcut_qparams(site: Site, qparams: Mapping[str, QParams]) -> QParams:
    """Return the 16-bit parameters of a shortcut site, computed from the 8-bit ones."""
    assert isinstance(site.spec, Derived)
    q = qparams[site.spec.sources[0]]
    scale, zero_point = numerics.widen_to_16bit(q.step, q.zero)
    return QParams((scale,), (zero_point,), site.qmin, site.qmax)


def given_qparams(annotations: Annotations, given: Mapping[str, QParams]) -> dict[str, QParams]:
    """Return the parameters of every activation and shortcut site, derived from those of the sites that own theirs."""
    by_name = {site.name: site for site in annotations.sites}
    result = {}
    for site in annotations.sites:
        if site.role == Role.ACTIVATION:
            leader = by_name[annotations.leaders[site.name]]
            spec = leader.spec
            result[site.name] = fixed_qparams(leader, spec) if isinstance(spec, Fixed) else given[leader.name]
    return result | {
        site.name: shortcut_qparams(site, result) for site in annotations.sites if site.role == Role.SHORTCUT
    }


def fixed_qparams(site: Site, spec: Fixed) -> QParams:
    """Return the parameters of a site that are known beforehand, with the scale repeated for each zero point.

    Raises:
        UnsupportedError: a zero point is none of the site's quantized values.
    """
    zeros = spec.zero_point if isinstance(spec.zero_point, tuple) else (spec.zero_point,)
    if outside := [zero for zero in zeros if not site.qmin <= zero <= site.qmax]:
        problem = f"the zero point {outside[0]} of Fixed is outside of its quantized values, {site.qmin} to {site.qmax}"
        raise UnsupportedError(site.name, site.origin.operator or None, problem, source=site.origin.source or None)
    return QParams((spec.scale,) * len(zeros), zeros, site.qmin, site.qmax, site.axis)


def activation_ranges(prepared: Prepared, found: Mapping[str, Statistics]) -> dict[str, list[Range]]:
    """Return the ranges that each site's method computes from its statistics: one, or one per channel."""
    logits, result = softmax_operands(prepared.annotations.module), {}
    for site in prepared.annotations.sites:
        if site.name in found and isinstance(site.spec, Observed):
            method, statistics = method_of(site.spec.method), found[site.name]
            if site.value in logits:
                method = without_mask(method)
            if site.axis is None:
                result[site.name] = [method(statistics, site.qmin, site.qmax)]
            else:
                result[site.name] = channel_ranges(statistics, method, site.qmin, site.qmax)
    return result


CALIBRATE_AGAIN = "use the model and the recipe that they were made with, or calibrate(prepared, data) again"


def _activation(site: Site, chosen: Mapping[str, list[Range]]) -> QParams:
    if isinstance(site.spec, Fixed):
        return fixed_qparams(site, site.spec)
    if isinstance(site.spec, Observed):
        try:
            if site.spec.symmetric:
                most = [max(-low, high) for low, high in chosen[site.name]]
                affines = [numerics.symmetric_qparams(end, site.qmin, site.qmax) for end in most]
            else:
                affines = [numerics.affine_qparams(*ends, site.qmin, site.qmax) for ends in chosen[site.name]]
        except ValueError as error:
            raise CalibrationError(site.name, site.origin.operator, str(error)) from error
    else:
        raise UnsupportedError(
            site.name, site.origin.operator, f"an activation cannot have parameters of the kind {site.spec}"
        )
    scales, zeros = zip(*affines, strict=True)
    return QParams(scales, zeros, site.qmin, site.qmax, site.axis)


def weight_qparams(
    annotations: Annotations,
    qparams: Mapping[str, QParams],
    remarks: list[str],
    given: Mapping[str, QParams],
    chosen: Mapping[str, RoundedWeight],
    cached_scales: dict[tuple[str, int], np.ndarray] | None = None,
) -> dict[str, QParams]:
    """Return the parameters of all weights and biases, weight scales enlarged where a bias would overflow.

    Args:
        annotations: sites and regions.
        qparams: parameters of the activation sites.
        remarks: a note is added for each weight whose scales were enlarged.
        given: parameters that replace those computed from the weight.
        chosen: weights that are rounded already.
        cached_scales: cache of the scales computed from weight values, by site and groups; missing entries are added.
    """
    cached_scales = {} if cached_scales is None else cached_scales
    result: dict[str, QParams] = {}
    for region in annotations.regions:
        if region.record.roles.weight is None:
            continue
        x_site, w_site, b_site = anchor_sites(annotations, region)
        weight, bias = parameters_of(annotations.module, region)
        step_x = qparams[x_site.name].step if b_site else 1.0
        if w_site.name in given:
            plain = np.array(given[w_site.name].scales, np.float32)
        else:
            own = WeightScaleRule.of(region, w_site)
            if (w_site.name, own.groups) not in cached_scales:
                cached_scales[w_site.name, own.groups] = own(weight)
            plain = cached_scales[w_site.name, own.groups]
        plain, fitted = _fitted_scales(region, weight, bias if b_site else None, w_site, step_x, plain)
        if (enlarged := fitted > plain).any():
            remarks.append(f"{w_site.name}: scales of {int(enlarged.sum())} channels enlarged to fit the bias")
        if w_site.name in result:
            fitted = np.maximum(fitted, np.array(result[w_site.name].scales, np.float32))
        if not np.isfinite(fitted).all():
            raise UnsupportedError(
                w_site.name,
                region.anchor.name,
                "its weight or bias contains values that are not finite",
                remedy=f"leave it in float: skip=[{origin(region.anchor).path!r}]",
            )
        scales = tuple(map(float, fitted))
        result[w_site.name] = QParams(scales, (0,) * len(scales), w_site.qmin, w_site.qmax, w_site.axis)
    result.update({site: rounded.qparams for site, rounded in chosen.items()})
    for region in annotations.regions:
        if region.record.roles.weight is not None:
            x_site, w_site, b_site = anchor_sites(annotations, region)
            if b_site is not None:
                _, bias = parameters_of(annotations.module, region)
                assert bias is not None  # a bias site exists only for a bias
                outputs = len(bias)
                result[b_site.name] = _bias_qparams(qparams[x_site.name], result[w_site.name], outputs)
    return result


def _fitted_scales(
    region: Region,
    weight: np.ndarray,
    bias: np.ndarray | None,
    site: Site,
    scale_x: float,
    plain: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales of a weight by its values and after fitting its bias, one or one per channel of its axis.

    The groups of a transposed convolution share scales, because its channel axis holds the outputs of one group.
    All-zero channels get the fitted scale in both results, so that they do not count as enlarged.
    """
    rows, own = weight_outputs_first(region, weight), WeightScaleRule.of(region, site)
    absmax = by_row_blocks(lambda rows: np.abs(rows).max(1), rows.reshape(len(rows), -1))
    rows_by_scale = own.rows_by_scale(weight)
    count = len(rows_by_scale)
    if len(plain) != count:
        raise CalibrationError(
            f"parameters of {site.name}", None, f"{len(plain)} scales are given, but the weight has {count}"
        )
    fitted = numerics.fit_weight_scale(scale_per_output(plain, len(rows)), absmax, bias, scale_x)
    fitted = fitted.reshape(-1, count).max(0)
    return np.where(rows_by_scale.any(1), plain, fitted), fitted


@dataclass(frozen=True)
class WeightScaleRule:
    """Computes the scales of a weight from its values, f32 weight -> f32[C].

    Attributes:
        kind: datatype of the quantized weight.
        group: size of weight groups, 0 for none.
        axis: channel axis, ``None`` for one scale per tensor.
        groups: groups of a transposed convolution, whose channel axis holds the outputs of one group; else 0.
    """

    kind: Datatype
    group: int
    axis: int | None
    groups: int

    @staticmethod
    def of(region: Chain, site: Site) -> WeightScaleRule:
        """Return the rule for the weight of a region."""
        axis = site.axis if isinstance(site.axis, int) else None
        return WeightScaleRule(site.record, site.group, axis, _groups(region) if region.record.roles.outputs else 0)

    def rows_by_scale(self, weight: np.ndarray) -> np.ndarray:
        """Return the weight as [C, K], where row c holds all elements that share scale c."""
        rows = outputs_first(weight, self.groups) if self.groups else weight
        count = 1 if self.axis is None else weight.shape[self.axis]
        return rows.reshape(len(rows) // count, count, -1).swapaxes(0, 1).reshape(count, -1)

    def __call__(self, weight: np.ndarray) -> np.ndarray:
        """Return the scales f32[C] of a weight."""
        return channel_scales(self.rows_by_scale(weight), self.kind, self.group)


def _groups(region: Chain) -> int:
    return int(call_of(region.anchor, region.record).arguments.get("groups", 1))


def weight_outputs_first(region: Chain, weight: np.ndarray) -> np.ndarray:
    """Return a weight with all output channels on the first axis, group after group."""
    if not region.record.roles.outputs:
        return weight
    return outputs_first(weight, _groups(region))


def scale_per_output(scales: Sequence[float] | np.ndarray, outputs: int) -> np.ndarray:
    """Repeat scales that are shared by the tensor or by groups, so that there is one per output channel."""
    return np.tile(np.asarray(scales, np.float32), outputs // len(scales))


def _bias_qparams(x: QParams, w: QParams, outputs: int) -> QParams:
    """Return the parameters of a bias, one scale or one per output channel."""
    units = w.scales if w.axis is None else scale_per_output(w.scales, outputs)
    scales = tuple(map(float, numerics.accumulator_scale(x.step, units)))
    return QParams(scales, (0,) * len(scales), *INT32_RANGE, None if w.axis is None else 0)


def anchor_sites(annotations: Annotations, region: Region) -> tuple[Site, Site, Site | None]:
    """Return the sites of an anchor's activation, weight and bias."""
    x, weight, _ = layer_operands(region.anchor)
    by_value = annotations.by_value
    return (
        by_value[x.name, region.x_role],
        by_value[weight.name, Role.WEIGHT],
        by_value.get((region.anchor.name, Role.BIAS)),
    )


def parameters_of(module: fx.GraphModule, region: Region) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the weight of a layer, and its bias or ``None``."""
    _, weight, bias = layer_operands(region.anchor)
    values: np.ndarray = getattr(module, weight.target).detach().numpy()
    return values, None if bias is None else getattr(module, bias.target).detach().numpy()
