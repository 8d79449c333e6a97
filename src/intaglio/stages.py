"""The stages of quantization, one function each, in the order in which `intaglio.quantize` calls them.

`capture`, `prepare`, `equalize`, `calibrate`, `correct`, `convert`, `requantize`, `plan`, `compile`: each returns a
value that can be printed, kept and handed to the next stage by hand. `compile` takes an earlier stage too, and
`annotate` shows what `prepare` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn
from torch.export import ExportedProgram

from intaglio import build
from intaglio.backends import BACKENDS
from intaglio.backends.c_backend import COptions
from intaglio.backends.inductor.inductor_backend import InductorOptions
from intaglio.backends.native_backend import CompileOptions
from intaglio.backends.onnx.onnx_backend import OnnxOptions
from intaglio.backends.onnx.onnx_export import OnnxFile
from intaglio.backends.protocol import backend_named, compile_with, options_for
from intaglio.build.planned import Planned
from intaglio.errors import InputError
from intaglio.lower import Lowered, Requantizer, requantize
from intaglio.quant.annotate.node_annotations import Annotator
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.calibrate.callbacks import Calibrator
from intaglio.quant.calibrate.prepare import Prepared, annotate
from intaglio.quant.calibrate.prepare import prepare as prepare_captured
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.correct.correct_weights import correct
from intaglio.quant.correct.corrections import Corrections
from intaglio.quant.correct.equalize import equalize
from intaglio.quant.frontends.from_qdq import from_qdq as from_captured
from intaglio.quant.qat import PreparedQat, calibrate_qat, convert_qat, prepare_qat
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.convert import convert as convert_prepared
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.runtime import Coverage, QuantizedModel
from intaglio.tracing import capture
from intaglio.tracing.captured import Captured, expect

if TYPE_CHECKING:
    from intaglio.backends.inductor.inductor_model import InductorModel

__all__ = [
    "Annotations",
    "COptions",
    "Captured",
    "CompileOptions",
    "Corrections",
    "Coverage",
    "InductorOptions",
    "Lowered",
    "OnnxFile",
    "OnnxOptions",
    "Parameters",
    "Planned",
    "Prepared",
    "PreparedQat",
    "Quantizer",
    "Ranges",
    "Reference",
    "Requantizer",
    "annotate",
    "calibrate",
    "capture",
    "compile",
    "convert",
    "correct",
    "equalize",
    "from_qdq",
    "plan",
    "prepare",
    "requantize",
]


@overload
def prepare(
    captured: Captured, quantizer: Quantizer | Annotator | None = None, qat: Literal[False] = False
) -> Prepared: ...
@overload
def prepare(
    captured: Captured, quantizer: Quantizer | Annotator | None = None, *, qat: Literal[True]
) -> PreparedQat: ...
@overload
def prepare(captured: Captured, quantizer: Quantizer | Annotator | None, qat: Literal[True]) -> PreparedQat: ...
def prepare(
    captured: Captured, quantizer: Quantizer | Annotator | None = None, qat: bool = False
) -> Prepared | PreparedQat:
    """Fold what can be folded, find the sites, and put an observer on each.

    Args:
        captured: the captured model.
        quantizer: a `Quantizer`, or an object that annotates nodes (`intaglio.annotation`).
        qat: put a fake-quantize on each site instead, of a model that was captured with ``train=True``.

    Returns:
        A model that is called as the float model was, and counts what it sees or is trained.

    Raises:
        UnsupportedError: nothing can be quantized, or an operator cannot be trained.
    """
    return prepare_qat(captured, quantizer) if qat else prepare_captured(captured, quantizer)


def calibrate(prepared: Prepared | PreparedQat, data: Any, **options: Any) -> Ranges:
    """Collect statistics of every site over the data, which is read once.

    Callbacks of patterns choose the parameters of their regions, producers first, over batches that are kept. A model
    prepared for training is calibrated as it evaluates, and its scales start from what is found.

    Args:
        prepared: the prepared model. On an error its statistics are as they were before.
        data: an iterable of tensors, tuples, dictionaries or (inputs, label) pairs; a `DataLoader`; or a function that
            is called with the prepared model.
        options: ``samples`` stops after that many; ``progress`` shows a bar; ``nonfinite`` makes a NaN or an infinity
            an "error", or leaves it out with "ignore"; ``first_batch`` is the index of the first batch (default: the
            one after those the model has seen); ``group`` are the processes that calibrate together (default: those of
            torch.distributed, where it is initialised); ``cache`` are bytes of values that callbacks may keep between
            regions, beyond which these wait in a temporary file.

    Returns:
        Statistics by site, and the parameters that callbacks chose.

    Raises:
        CalibrationError: the data are empty, not finite, or of other shapes than the model's.
    """
    if isinstance(prepared, PreparedQat):
        return calibrate_qat(prepared, data, **options)
    expect(prepared, Prepared, "calibrate")
    return Calibrator(prepared, data, **options).calibrate()


def convert(
    prepared: Prepared | PreparedQat, ranges: Ranges | Parameters | None = None, corrections: Corrections | None = None
) -> Reference:
    """Turn ranges into scales and zero points, and weights and biases into integers.

    Args:
        prepared: the prepared model. A trained one has its parameters already, and takes no others.
        ranges: statistics (default: what the prepared model has seen), or `Parameters`, which are taken as they are and
            need no data; only a weight's scale that its bias does not fit grows.
        corrections: integers and biases that `correct` found better than the nearest ones.

    Returns:
        The reference model: a PyTorch graph with every quantize and dequantize written out.

    Raises:
        CalibrationError: a site has seen no data.
        UnsupportedError: an accumulator could overflow.
        InputError: a trained model is given ranges or corrections.
    """
    if not isinstance(prepared, PreparedQat):
        return convert_prepared(prepared, ranges, corrections)
    if ranges is not None or corrections is not None:
        raise InputError(
            "convert",
            None,
            "ranges or corrections for a model that was trained with its own",
            remedy="convert(prepared) alone; calibrate(prepared, data) takes ranges over",
        )
    return convert_qat(prepared)


def from_qdq(
    model: nn.Module | ExportedProgram | Captured,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Reference:
    """Read a model that another tool quantized, with its scales and zero points; nothing is calibrated.

    Operators between dequantize and quantize that have no int8 kernel stay in float.

    Args:
        model: what `convert_pt2e` gives, a program that was exported from it, or any module whose graph holds
            ``quantized_decomposed.quantize_per_tensor`` and its kin.
        example_inputs, example_kwargs, dynamic_shapes: as in `capture`; a program has its own example.

    Returns:
        The reference model.

    Raises:
        UnsupportedError: quantized values cannot be taken over, such as those whose scales are computed while the model
            runs.
    """
    if isinstance(model, Captured):
        return from_captured(model)
    module: nn.Module = model.module() if isinstance(model, ExportedProgram) else model
    if example_inputs is None and isinstance(model, ExportedProgram) and model.example_inputs is not None:
        example_inputs, example_kwargs = model.example_inputs
    if example_inputs is None:
        raise InputError("from_qdq", None, "no example inputs", remedy="from_qdq(model, example_inputs)")
    captured = capture(module, example_inputs, example_kwargs=example_kwargs, dynamic_shapes=dynamic_shapes)
    return from_captured(captured)


def plan(lowered: Lowered, isa: str | None = None) -> Planned:
    """Plan an integer graph as `compile` does: partitions, layouts, memory and schedules, each with its reason.

    Args:
        lowered: the integer graph.
        isa: the instruction set (default: the best of this machine).

    Returns:
        The plan, whose ``text()`` says all of it, and which `compile` takes.

    Raises:
        BuildError: this machine does not run the instruction set.
    """
    expect(lowered, Lowered, "plan")
    return build.plan_program(lowered, isa=isa)


@overload
def compile(
    stage: Reference | Lowered | Planned,
    backend: Literal["native"] = "native",
    *,
    isa: str | Iterable[str] | None = None,
    tune: Any = False,
    on_new_shape: str = "plan",
    float_model: nn.Module | None = None,
) -> QuantizedModel: ...
@overload
def compile(stage: Reference, backend: Literal["inductor"], *, example_inputs: Any = None) -> InductorModel: ...
@overload
def compile(
    stage: Reference, backend: Literal["onnx"], *, path: str | Path, sums: Literal["levels", "float"] = "levels"
) -> OnnxFile: ...
@overload
def compile(
    stage: Reference | Lowered, backend: Literal["c"], *, folder: str | Path, isa: str | Iterable[str] | None = None
) -> Path: ...
def compile(stage: Reference | Lowered | Planned, backend: str = "native", **options: Any) -> Any:
    """Compile a reference model, an integer graph or a plan with one of the backends.

    Args:
        stage: a reference; the backends "native" and "c" take an integer graph too, and "native" a plan, which has its
            instruction set and schedules.
        backend: "native", one C++ program for the whole network; "inductor", TorchInductor; "onnx", a file of standard
            operators; "c", sources that run without Python.
        options: the backend's: fields of `CompileOptions` for "native", `InductorOptions`, `OnnxOptions`, `COptions`.

    Returns:
        A `QuantizedModel` or an `InductorModel`, which are called as the float model was; an `OnnxFile`, which says
        what was written; or the path of the folder of C.

    Raises:
        UnsupportedError: the backend has no form of an operator.
        InputError: there is no such backend, or it has no such option.
        BuildError: this machine runs none of the instruction sets, or the compiler fails.
    """
    chosen = backend_named(BACKENDS, backend)
    return compile_with(chosen, stage, options_for(chosen, options))
