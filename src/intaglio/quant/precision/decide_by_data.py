"""Decide by calibration data which values stay in float for their readers, and which layers are split."""

from __future__ import annotations

from intaglio.quant.annotate.annotate_graph import quantized_concatenations
from intaglio.quant.annotate.find_sites import ValueNames
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.correct.calibration_cache import Calls
from intaglio.quant.correct.corrections import Equalization
from intaglio.quant.precision.apply_decisions import with_data_floats, with_split_layers
from intaglio.quant.precision.measure_rounding import coarse_values, uneven_concatenations
from intaglio.quant.precision.split_layers import split_readers


def decide_by_data(prepared: Prepared, calls: Calls, group: Group) -> tuple[Prepared, Equalization]:
    """Return the model with the decisions that its data asks for, and these decisions.

    The model is unchanged if an annotator decides.

    Args:
        prepared: the prepared model.
        calls: the tensors of each call on this rank.
        group: the ranks.
    """
    if prepared.quantizer.annotator is not None:
        return prepared, Equalization()
    annotations = prepared.annotations
    uneven = uneven_concatenations(prepared, calls, group)
    names = ValueNames(annotations.module.graph)
    splits = {names.of(node): ends for node, ends in uneven.items() if split_readers(node, annotations)}
    prepared = with_split_layers(prepared, splits)
    left = quantized_concatenations(prepared.annotations, prepared.quantizer, prepared.classes)
    floats = {names.of(node): ends for node, ends in uneven.items() if node.name in left}
    prepared = with_data_floats(prepared, floats, {})
    coarse = coarse_values(prepared, calls, group)
    return with_data_floats(prepared, {}, coarse), Equalization(concatenations=floats, splits=splits, coarse=coarse)
