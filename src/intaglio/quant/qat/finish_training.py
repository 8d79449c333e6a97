"""Calibration of a model in training, and its conversion to a `Reference`, both through the post-training functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from intaglio.errors import CalibrationError
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.quant.calibrate.calibration_loop import calibrate
from intaglio.quant.calibrate.prepare import Prepared, reprepare
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.correct.corrections import Corrected
from intaglio.quant.qat.fake_quantize import FakeQuantize
from intaglio.quant.qat.prepared_qat import PreparedQat
from intaglio.quant.qdq.convert import Reference, convert
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.qdq.qparams import activation_qparams


def calibrate_qat(trained: PreparedQat, data: Any, **options: Any) -> Ranges:
    """Calibrate with the current weights in evaluation mode, and start every scale from the result."""
    prepared = as_trained(trained)
    ranges = calibrate(prepared, data, **options)
    qparams = activation_qparams(prepared, ranges)
    for module in trained.rounding():
        if isinstance(module, FakeQuantize) and module.observed:
            module.set_qparams(qparams[module.site.name])
    trained.follow_weights()
    return ranges


def convert_qat(trained: PreparedQat) -> Reference:
    """Convert a trained model with batch norms folded by their running statistics and with the trained scales.

    The outputs are those of the trained model in evaluation mode.

    Raises:
        CalibrationError: a site has seen no data.
    """
    if unseen := trained.unseen():
        raise CalibrationError(
            ", ".join(unseen[:5]),
            None,
            f"{len(unseen)} sites have seen no data",
            remedy="train some batches, or call calibrate(prepared, data)",
        )
    prepared = as_trained(trained)
    if trained._mode.observe:
        trained.follow_weights()
    qparams = {module.site.name: module.qparams() for module in trained.rounding()}
    annotations = prepared.annotations
    return convert(prepared, Parameters.of(annotations.sites, annotations.leaders, qparams, Corrected()))


def as_trained(trained: PreparedQat) -> Prepared:
    """Prepare the model for post-training quantization with its current parameters.

    Raises:
        CalibrationError: training changed which values are quantized.
    """
    prepared = trained._plan.prepared
    module = copy_graph(prepared.annotations.module)
    for name, values in trained.constants().items():
        setattr(module, name, values)
    found = reprepare(prepared, module)
    if found.annotations.sites_text() != prepared.annotations.sites_text():
        raise CalibrationError(
            "model",
            None,
            "training changed the weights so that other values are quantized than those that were prepared",
            remedy="prepare again, and leave operators whose results became constant in float",
        )
    return replace(found, model_info=prepared.model_info)
