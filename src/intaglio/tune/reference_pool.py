"""`ReferencePool`: references of a model with changed recipes, which share calibration and corrections."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from intaglio.fxgraph.uneven_concatenations import Extrema
from intaglio.quant.annotate.sites import Site
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.prepare import Prepared, prepare
from intaglio.quant.correct.calibration_cache import CACHED_SAMPLES, Calls, cached_calls
from intaglio.quant.correct.correct_weights import correct
from intaglio.quant.correct.corrections import Corrected
from intaglio.quant.equalization.apply_equalization import apply_equalization
from intaglio.quant.precision.layer_bytes import layers_to_split, with_asked_bytes
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.qdq.parameters import Parameter, Parameters, owners
from intaglio.quant.qdq.qparams import activation_qparams
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.tracing import Captured


@dataclass
class ReferencePool:
    """Parameters by site and by how the site is quantized, from which references of changed recipes are made.

    All references have the equalization of the first one. Sites and weights that it does not have are calibrated and
    corrected once for each way to quantize them.

    Attributes:
        captured: graph of the float model.
        quantizer: quantizer of the recipe that is changed.
        base: its reference.
        batches: batches for calibration and correction.
        entries: parameters by site.
        weights: corrected weights by site.
        operand_ranges: ranges of the operands of layers in two bytes, by the value of the layer.
    """

    captured: Captured
    quantizer: Quantizer
    base: Reference
    batches: Sequence[Any]
    entries: dict[Hashable, Parameter] = field(default_factory=dict)
    weights: dict[Hashable, np.ndarray] = field(default_factory=dict)
    operand_ranges: dict[str, Extrema] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._keep(self.base)
        known = self.base.parameters.corrected.equalization.layer_bytes
        self.operand_ranges |= {name: (one.low, one.high) for name, one in known.items() if one.operand == 2}

    def _keep(self, reference: Reference) -> None:
        """Store the parameters of a reference that are not known yet."""
        parameters = reference.parameters
        for site in reference.annotations.sites:
            if site.name in parameters.entries:
                self.entries.setdefault(_key(site), parameters.entries[site.name])
            if site.name in parameters.corrected.quantized_weights:
                self.weights.setdefault(_key(site), parameters.corrected.quantized_weights[site.name])

    def quantizer_leaving(self, left: Iterable[str]) -> Quantizer:
        """Return the quantizer that leaves these operators in float too."""
        return replace(self.quantizer, recipe=self.quantizer.recipe.with_selection(skip=left))

    def uncorrected(self, quantizer: Quantizer) -> Reference:
        """Return the reference of a quantizer without corrections and equalization, calibrated anew."""
        prepared = prepare(self.captured, quantizer)
        return convert(prepared, calibrate(prepared, self.batches, progress=False) if prepared.observers else None)

    def reference(self, quantizer: Quantizer) -> Reference:
        """Return the reference of a quantizer. Activations and weights that were never quantized in this way are
        calibrated and corrected."""
        prepared = prepare(self.captured, quantizer)
        equalized = self._equalized(prepared)
        sites = equalized.annotations.sites
        if any(site.role == Role.WEIGHT and _key(site) not in self.entries for site in sites):
            ranges = calibrate(equalized, self.batches, progress=False)
            self._keep(convert(equalized, ranges, correct(equalized, ranges, self.batches)))
        self._calibrate_missing(equalized)
        entries = {site.name: self.entries[_key(site)] for site in sites if _key(site) in self.entries}
        weights = {site.name: self.weights[_key(site)] for site in sites if _key(site) in self.weights}
        known = self.base.parameters.corrected
        own = {site.name: _key(site) for site in self.base.annotations.sites if site.role == Role.WEIGHT}
        same = {site.value for site in sites if site.role == Role.WEIGHT and own.get(site.name) == _key(site)}
        anchors = {
            region.anchor.name
            for region in prepared.annotations.regions
            if not region.dynamic and any(value.name in same for value in region.anchor.all_input_nodes)
        }
        biases = {name: values for name, values in known.biases.items() if name in anchors}
        return convert(prepared, Parameters(entries, Corrected(equalized.equalization, weights, biases)))

    def _equalized(self, prepared: Prepared) -> Prepared:
        """Return a model with the equalization of the first one, and with the layers split that its recipe asks for."""
        known = replace(self.base.parameters.corrected.equalization, layer_bytes={})
        made, group = apply_equalization(prepared, known), Group.current()
        if not layers_to_split(made):
            return made
        return with_asked_bytes(made, self._calls(group), group, self.operand_ranges)

    def _calls(self, group: Group) -> Calls:
        return group.run_on_all_ranks(
            lambda: cached_calls(self.captured.signature, self.batches, CACHED_SAMPLES, group)
        )

    def _calibrate_missing(self, prepared: Prepared) -> None:
        """Calibrate the activations whose parameters are not known yet."""
        annotations = prepared.annotations
        missing = [
            site
            for site in owners(annotations.sites, annotations.leaders)
            if site.role == Role.ACTIVATION and _key(site) not in self.entries
        ]
        if missing:
            found = activation_qparams(prepared, calibrate(prepared, self.batches, progress=False))
            for site in missing:
                q = found[site.name]
                self.entries[_key(site)] = Parameter(site.datatype, q.qmin, q.qmax, tuple(q.scales), tuple(q.zeros))


def _key(site: Site) -> Hashable:
    """Return everything that the parameters of a site depend on, besides the data."""
    return replace(site, value="", origin=type(site.origin)())
