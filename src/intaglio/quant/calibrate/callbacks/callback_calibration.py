"""Calibration callbacks of patterns, which compute quantization parameters from float and quantized values."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from intaglio.argument_checks import check_arguments_except
from intaglio.errors import CalibrationError
from intaglio.ir import QParams
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Fixed
from intaglio.quant.calibrate.batches import Binder, is_function, peek
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.callbacks.calibration_info import (
    CalibrationInfo,
    CalibrationRun,
    quantize_weight,
    region_sites,
)
from intaglio.quant.calibrate.callbacks.given_parameters import Given, given_parameters, parameters_by_site
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.calibrate.tensor_statistics import Statistics
from intaglio.quant.evaluation.layerwise_eval import CACHE, LayerwiseEvaluation
from intaglio.quant.qdq.qparams import activation_qparams
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.user_patterns import ParameterChooser
from intaglio.signature import bind, dims_of
from intaglio.tracing.captured import expect


class CalibrationCallback:
    """Base class of callbacks, which choose the parameters of a region's sites from the values at these sites."""

    def calibrate(self, info: CalibrationInfo) -> Mapping[str, Given]:
        """Return site name -> parameters for the sites that this callback decides.

        All other sites get theirs from the statistics by the method of their setting.

        Raises:
            CalibrationError: the subclass does not define this method.
        """
        other = " (it defines calibrate_pattern)" if hasattr(self, "calibrate_pattern") else ""
        raise CalibrationError(
            type(self).__name__,
            None,
            f"the callback does not define the method calibrate{other}",
            remedy="define calibrate(self, info), which returns a dictionary from site name to parameters",
        )


class Calibrator:
    """Runs the callback of each pattern for its regions, in execution order; other sites use their setting's method.

    This is the interface of pattern frameworks to `intaglio.stages.calibrate`, which takes the same arguments. Without
    data, the callbacks must decide all sites.
    """

    @check_arguments_except("prepared")
    def __init__(self, prepared: Prepared, data: Any = None, *, cache: int = CACHE, **options: Any) -> None:
        expect(prepared, Prepared, "Calibrator")
        self.prepared, self.data, self.cache, self.options = prepared, data, cache, options

    def calibrate(self) -> Ranges:
        """Return statistics of every site, and the parameters that callbacks chose.

        Raises:
            CalibrationError: callbacks do not decide all sites, and data is missing.
        """
        asked = [region for region in self.prepared.annotations.regions if _callback(region) is not None]
        if self.data is None:
            return self._without_data()
        if not asked:
            return calibrate(self.prepared, self.data, **self.options)
        if is_function(self.data):
            raise CalibrationError(
                "data",
                None,
                "calibration callbacks need batches, but the data is a function",
                remedy="pass an iterable of batches",
            )
        binder = Binder.of(self.prepared.signature)
        batches = list(_batches_until(peek(self.data)[1], binder, self.options.get("samples")))
        ranges = calibrate(self.prepared, batches, **self.options)
        plain = activation_qparams(self.prepared, ranges)
        return replace(ranges, parameters=self._chosen(ranges, plain, batches))

    def _without_data(self) -> Ranges:
        """Return the parameters that callbacks choose without batches, for all sites."""
        prepared = self.prepared
        ranges = Ranges({name: Statistics() for name in prepared.observers}, graph=prepared.fingerprint)
        chosen = self._chosen(ranges, {}, [])
        own = {name for name, observer in prepared.observers.items() if observer.custom_qparams() is not None}
        if missing := [name for name in prepared.observers if name not in {*chosen, *own}]:
            names = ", ".join(missing[:5])
            problem = (
                f"there is no data, and no callback decides {len(missing)} of {len(prepared.observers)} sites: {names}"
            )
            raise CalibrationError("data", None, problem, remedy=DATA_OR_CALLBACKS)
        return replace(ranges, parameters=chosen)

    def _chosen(self, ranges: Ranges, plain: Mapping[str, QParams], batches: Sequence[Any]) -> dict[str, QParams]:
        """Return the parameters that callbacks choose.

        Args:
            ranges: statistics of all sites.
            plain: the parameters by the method of the settings; empty without data.
            batches: the data.
        """
        binder = Binder.of(self.prepared.signature)

        def leaves(batch: Any) -> Sequence[Any]:
            found = bind(self.prepared.signature, *binder(batch))
            dims_of(self.prepared.signature, found)
            return found

        def qparams_by(method: str) -> Mapping[str, QParams]:
            return activation_qparams(self.prepared.with_method(method), ranges)

        run = CalibrationRun(batches, leaves, functools.cache(qparams_by))
        return _CallbackRunner(self.prepared, plain, run, self.cache).run()


DATA_OR_CALLBACKS = (
    "pass an iterable of batches, or give all patterns a callback that needs none, such as GlobalCalibrationCallback"
)


def _batches_until(items: Iterator[Any], binder: Binder, samples: int | None) -> Iterator[Any]:
    """Yield batches until there are this many samples, as `calibrate` does."""
    seen = 0
    for item in items:
        args, kwargs = binder(item)
        yield item
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.dim()]
        seen += tensors[0].shape[0] if tensors else 1
        if samples is not None and seen >= samples:
            return


def _callback(region: Region) -> ParameterChooser | None:
    return region.pattern.calibration if region.pattern is not None else None


class _CallbackRunner:
    """Runs the callbacks during one layerwise evaluation of the model.

    ``given`` holds the chosen parameters by the leading site of each sharing group.
    """

    def __init__(
        self, prepared: Prepared, plain: Mapping[str, QParams], calibration: CalibrationRun, cache: int
    ) -> None:
        self.annotations = prepared.annotations
        self.calibration = calibration
        calls = [calibration.leaves(item) for item in calibration.items]
        self.sites = {site.name: site for site in self.annotations.sites}
        self.given: dict[str, QParams] = {}
        open_until: dict[str, int] = {}
        for index, region in enumerate(self.annotations.regions):
            if _callback(region) is not None:
                leaders = {self._leader(name) for name in region_sites(self.annotations, region)}
                loose = [name for name in leaders if not isinstance(self.sites[name].spec, Fixed)]
                open_until.update(dict.fromkeys(loose, index))
        self.plain, self.open_until = plain, open_until
        settled = {name: q for name, q in plain.items() if self._leader(name) not in open_until}
        self.evaluation = LayerwiseEvaluation(self.annotations, calls, settled, cache=cache)

    def run(self) -> dict[str, QParams]:
        """Return the parameters that callbacks chose, by the leading site of each sharing group."""
        with closing(iter(self.evaluation)) as regions:  # an error leaves the modes of PyTorch as they were
            for index, region in enumerate(regions):
                self._calibrate(index, region)
        return dict(self.given)

    def _calibrate(self, index: int, region: Region) -> None:
        """Let the callback of a region choose its parameters, and close the groups that no later region belongs to."""
        callback, sites = _callback(region), region_sites(self.annotations, region)
        if callback is not None and region.pattern is not None:
            info = CalibrationInfo(self.evaluation, region, region.pattern, sites, self.calibration)
            for name, value in parameters_by_site(callback.calibrate(info), region.pattern.name, sites).items():
                self._store_chosen(name, value, region)
        for leader, last in self.open_until.items():
            if last <= index:
                self._set_group_qparams(leader, self.given.get(leader, self.plain.get(leader)))
        self._weights(region)

    def _leader(self, name: str) -> str:
        return self.annotations.leaders[name]

    def _store_chosen(self, name: str, value: Given, region: Region) -> None:
        """Store the parameters that a callback chose for a site; sites that already have parameters keep them."""
        leader = self.sites[self._leader(name)]
        if leader.name in self.given or leader.name in self.evaluation.qparams:
            return
        self.given[leader.name] = given_parameters(leader, value, region)
        self._set_group_qparams(leader.name, self.given[leader.name])

    def _set_group_qparams(self, leader: str, q: QParams | None) -> None:
        """Set the parameters of all activation sites of a sharing group in the evaluation."""
        if q is None:
            return
        for name in self.annotations.leaders:
            if self._leader(name) == leader and self.sites[name].role == Role.ACTIVATION:
                self.evaluation.set_qparams(name, q)

    def _weights(self, region: Region) -> None:
        quantize_weight(self.evaluation, region, self.given)
