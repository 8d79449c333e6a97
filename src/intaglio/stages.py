"""The stages of quantization, one function each, in the order in which `intaglio.quantize` calls them.

The stages are `capture`, `prepare`, `equalize`, `calibrate`, `correct`, `convert`, `requantize`, `plan` and `compile`.
Each function returns a value that can be printed, stored and passed to the next stage. `compile` accepts the results of
earlier stages too, and `annotate` shows what `prepare` would decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn
from torch.export import ExportedProgram

from intaglio import build
from intaglio.argument_checks import check_arguments_except
from intaglio.backends import BACKENDS
from intaglio.backends.c_backend import COptions
from intaglio.backends.inductor.inductor_backend import InductorOptions
from intaglio.backends.native_backend import CompileOptions
from intaglio.backends.onnx.onnx_backend import OnnxOptions
from intaglio.backends.onnx.onnx_export import OnnxFile
from intaglio.backends.protocol import backend_named, compile_with, options_for
from intaglio.build.planned import Planned
from intaglio.checkpoints import Checkpoint, read_checkpoint
from intaglio.errors import InputError
from intaglio.lower import Lowered, Requantizer, requantize
from intaglio.quant.annotate.node_annotations import Annotator
from intaglio.quant.annotate.regions import Annotations
from intaglio.quant.calibrate.callbacks.callback_calibration import Calibrator
from intaglio.quant.calibrate.prepare import Prepared, annotate
from intaglio.quant.calibrate.prepare import prepare as prepare_captured
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.correct.correct_weights import correct
from intaglio.quant.correct.corrections import Corrections
from intaglio.quant.equalization.equalize import equalize
from intaglio.quant.frontends.from_qdq import from_qdq as from_captured
from intaglio.quant.imported_weights.fill_model import imported_recipe
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight
from intaglio.quant.imported_weights.weight_modules import with_weights
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
    "Checkpoint",
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
    "QuantizedWeight",
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
    "imported_recipe",
    "plan",
    "prepare",
    "read_checkpoint",
    "requantize",
    "with_weights",
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
@check_arguments_except("captured", "quantizer")
def prepare(
    captured: Captured, quantizer: Quantizer | Annotator | None = None, qat: bool = False
) -> Prepared | PreparedQat:
    """Simplify the captured graph, find its quantization points (sites) and insert an observer at each.

    Args:
        captured: the captured model.
        quantizer: a `Quantizer`, or any object that annotates nodes (`intaglio.annotation`). Default: ``Quantizer()``.
        qat: insert fake-quantize modules for training instead of observers. The model must have been captured with
            ``train=True``.

    Returns:
        A model that is called like the float model and collects statistics, or with ``qat`` one to be trained.

    Raises:
        UnsupportedError: no operator can be quantized, or with ``qat`` an operator cannot be trained.

    Examples:
        >>> captured = stages.capture(model, (x,))
        >>> prepared = stages.prepare(captured)
    """
    return prepare_qat(captured, quantizer) if qat else prepare_captured(captured, quantizer)


@check_arguments_except("prepared")
def calibrate(prepared: Prepared | PreparedQat, data: Any, **options: Any) -> Ranges:
    """Collect statistics of every site over the data, which is read once.

    Callbacks of patterns choose the parameters of their regions, producers before consumers, over cached batches. A
    model prepared for training is calibrated in evaluation mode, and its scales start from the ranges found.

    Args:
        prepared: the prepared model. If an error occurs its statistics are restored.
        data: an iterable of tensors, tuples, dictionaries or (inputs, label) pairs, a `DataLoader`, or a function that
            is called with the prepared model.
        options: keyword arguments. ``samples``: number of samples after which to stop (default: all). ``progress``:
            show a progress bar. ``nonfinite``: raise an "error" at a NaN or an infinity, or "ignore" the value.
            ``first_batch``: index of the first batch (default: the one after those the model has seen). ``group``:
            processes that calibrate together (default: those of torch.distributed if it is initialized). ``cache``:
            bytes of values that callbacks may keep in memory between regions; more values go to a temporary file.

    Returns:
        The statistics of every site, and the parameters that callbacks chose.

    Raises:
        CalibrationError: the data is empty, is not finite, or has other shapes than the model.

    Examples:
        >>> ranges = stages.calibrate(prepared, batches, samples=512)
    """
    if isinstance(prepared, PreparedQat):
        return calibrate_qat(prepared, data, **options)
    expect(prepared, Prepared, "calibrate")
    return Calibrator(prepared, data, **options).calibrate()


@check_arguments_except("prepared")
def convert(
    prepared: Prepared | PreparedQat, ranges: Ranges | Parameters | None = None, corrections: Corrections | None = None
) -> Reference:
    """Compute scales and zero points from ranges, and quantize weights and biases.

    Args:
        prepared: the prepared model. A trained model has its own parameters and accepts no others.
        ranges: statistics (default: those of the prepared model), or `Parameters`, which are used unchanged and need no
            data, except that the scale of a weight grows if its bias would not fit int32.
        corrections: weights and biases of `correct`, used instead of round-to-nearest.

    Returns:
        The reference model, a PyTorch graph with explicit quantize and dequantize operators.

    Raises:
        CalibrationError: a site has seen no data.
        UnsupportedError: an int32 accumulator could overflow.
        InputError: a trained model is given ranges or corrections.

    Examples:
        >>> reference = stages.convert(prepared, ranges)
    """
    if not isinstance(prepared, PreparedQat):
        return convert_prepared(prepared, ranges, corrections)
    if ranges is not None or corrections is not None:
        raise InputError(
            "convert",
            None,
            "a model prepared for training has its own parameters; ranges and corrections cannot be given",
            remedy="call convert(prepared) without them; calibrate(prepared, data) sets the scales from ranges",
        )
    return convert_qat(prepared)


@check_arguments_except("model")
def from_qdq(
    model: nn.Module | ExportedProgram | Captured,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Reference:
    """Import a model that another tool quantized, with its scales and zero points. No calibration takes place.

    Operators between a dequantize and a quantize that have no int8 kernel stay in float.

    Args:
        model: the result of `convert_pt2e`, a program exported from it, or any module whose graph has operators of
            ``quantized_decomposed`` such as ``quantize_per_tensor``.
        example_inputs: a tuple with the arguments of one call (default: those stored in an exported program).
        example_kwargs: keyword arguments of that call.
        dynamic_shapes: dynamic dimensions, as in `capture`.

    Returns:
        The reference model.

    Raises:
        UnsupportedError: quantization parameters cannot be imported, for example scales that are computed at run time.
        InputError: ``example_inputs`` are needed and not given.

    Examples:
        >>> reference = stages.from_qdq(convert_pt2e(prepared), (x,))
    """
    if isinstance(model, Captured):
        return from_captured(model)
    module: nn.Module = model.module() if isinstance(model, ExportedProgram) else model
    if example_inputs is None and isinstance(model, ExportedProgram) and model.example_inputs is not None:
        example_inputs, example_kwargs = model.example_inputs
    if example_inputs is None:
        problem = "example inputs are needed to capture the model, and none were given"
        raise InputError("from_qdq", None, problem, remedy="call from_qdq(model, example_inputs)")
    captured = capture(module, example_inputs, example_kwargs=example_kwargs, dynamic_shapes=dynamic_shapes)
    return from_captured(captured)


@check_arguments_except("lowered")
def plan(lowered: Lowered, isa: str | None = None) -> Planned:
    """Plan an integer graph for an instruction set: partitions, layouts, memory and schedules, each with its reason.

    Args:
        lowered: the integer graph.
        isa: the instruction set (default: the best one of this machine).

    Returns:
        The plan. Its ``text()`` prints every decision, and `compile` accepts it.

    Raises:
        BuildError: this machine does not support the instruction set.

    Examples:
        >>> print(stages.plan(stages.requantize(reference)).text())
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
    stage: Reference, backend: Literal["onnx"], *, path: str | Path, sums: Literal["uint8", "float"] = "uint8"
) -> OnnxFile: ...
@overload
def compile(
    stage: Reference | Lowered, backend: Literal["c"], *, folder: str | Path, isa: str | Iterable[str] | None = None
) -> Path: ...
@check_arguments_except("stage")
def compile(stage: Reference | Lowered | Planned, backend: str = "native", **options: Any) -> Any:
    """Compile a reference model, an integer graph or a plan with one of the backends.

    Args:
        stage: a reference model. The backends "native" and "c" accept an integer graph too, and "native" a plan, which
            already has its instruction set and schedules.
        backend: "native", one C++ program for the whole network; "inductor", TorchInductor; "onnx", a file of standard
            operators; or "c", sources that run without Python.
        options: keyword arguments of the backend: the fields of `CompileOptions` for "native", `InductorOptions` for
            "inductor", `OnnxOptions` for "onnx" and `COptions` for "c".

    Returns:
        A `QuantizedModel` or an `InductorModel`, both called like the float model; an `OnnxFile`, which describes the
        written file; or the path of the folder of C sources.

    Raises:
        UnsupportedError: the backend does not support an operator.
        InputError: the backend does not exist, or it does not have such an option.
        BuildError: this machine supports none of the instruction sets, or the compiler fails.

    Examples:
        >>> int8 = stages.compile(reference)
        >>> stages.compile(reference, "onnx", path="model.onnx")
    """
    chosen = backend_named(BACKENDS, backend)
    return compile_with(chosen, stage, options_for(chosen, options))
