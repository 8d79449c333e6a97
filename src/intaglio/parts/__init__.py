"""Models that cannot be captured as a whole: their largest submodules that can be are quantized inside of a copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from intaglio.argument_checks import check_arguments
from intaglio.errors import CaptureError, IntaglioError
from intaglio.integrations import integrations_in
from intaglio.parts.capture_part import PartCandidate
from intaglio.parts.find_parts import QuantizePart, calls_of, find_parts, float_copy
from intaglio.parts.part_outline import PartOutline, check_parts, check_selectors
from intaglio.parts.partly_quantized import PartlyQuantizedModel, coverage_of
from intaglio.parts.saved_parts import read_parts
from intaglio.quant.calibrate.batches import Call, Use

__all__ = [
    "PartCandidate",
    "PartOutline",
    "PartlyQuantizedModel",
    "check_parts",
    "check_selectors",
    "load_into",
    "quantize_parts",
]

logger = logging.getLogger("intaglio")


def quantize_parts(
    model: nn.Module,
    data: Any,
    refused: IntaglioError,
    samples: int | None,
    quantize_part: QuantizePart,
    further_calls: Callable[[nn.Module, Call], list[Use]] | None = None,
) -> PartlyQuantizedModel:
    """Return a copy of a model with its largest submodules that can be captured in int8.

    Args:
        model: the float model.
        data: an iterable of batches.
        refused: why the whole model cannot be quantized.
        samples: number of samples to calibrate with (default: all).
        quantize_part: quantizes one captured submodule.
        further_calls: returns functions that use the model in other ways, from the model and its first call.

    Raises:
        IntaglioError: ``refused``, if no part can be quantized or the model fails on the data.
    """
    copied = float_copy(model)
    before = {name: buffer.clone() for name, buffer in copied.named_buffers()}
    try:
        calls = calls_of(copied, data, samples)
    except CaptureError:
        raise refused from None
    size = sum(tensor.nbytes for tensor in (*copied.parameters(), *copied.buffers()))
    further = [] if further_calls is None else further_calls(copied, calls[0])
    found = find_parts(copied, calls, quantize_part, further)
    if not found.parts:
        raise refused
    _restore_buffers(copied, before, list(found.parts))
    quantized = PartlyQuantizedModel(copied, coverage_of(copied, found, size, refused.problem.splitlines()[0]))
    logger.info("%r\n%s", quantized, quantized.coverage)
    return quantized


def _restore_buffers(model: nn.Module, before: Mapping[str, torch.Tensor], parts: Sequence[str]) -> None:
    """Undo what the calls for quantizing have changed in buffers outside of the parts, such as counts of calls."""
    for name, value in before.items():
        owner, _, own_name = name.rpartition(".")
        if not any(f"{name}.".startswith(f"{part}." if part else "") for part in parts):
            setattr(model.get_submodule(owner), own_name, value)


@check_arguments
def load_into(path: str | Path, float_model: nn.Module, *, trust: bool = False) -> PartlyQuantizedModel:
    """Load a file of `PartlyQuantizedModel.save` into a copy of a float model of the same architecture.

    Args:
        path: the file.
        float_model: a model of the class and sizes that was quantized. Its weights are not used.
        trust: run the compiled programs that the file holds, as `load` does.

    Raises:
        ArtifactError: the file is damaged or belongs to another model.
    """
    copied = float_copy(float_model)
    for integration in integrations_in(copied):
        integration.install_hooks(copied)
    return PartlyQuantizedModel(copied, read_parts(Path(path), copied, trust))
