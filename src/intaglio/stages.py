"""The stages of quantization, one function each, in the order in which `intaglio.quantize` calls them.

`capture`, `prepare`, `equalize`, `calibrate`, `correct`, `convert`, `requantize`, `compile`: each returns a value that
can be printed, kept and handed to the next stage by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import nn
from torch.export import ExportedProgram

from intaglio.backends import BACKENDS
from intaglio.backends.c_backend import COptions
from intaglio.backends.inductor_backend import InductorOptions
from intaglio.backends.native_backend import CompileOptions
from intaglio.backends.onnx_backend import OnnxOptions
from intaglio.backends.onnx_export import OnnxFile
from intaglio.backends.protocol import backend_named, compile_with, options_for
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
from intaglio.tracing.captured import Captured

if TYPE_CHECKING:
    from intaglio.backends.inductor_model import InductorModel

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
    """Fold what can be folded, find the sites, put an observer on each, or with ``qat=True`` fake-quantize, for a model
    that was captured with ``train=True``. ``quantizer``: a `Quantizer`, or what annotates nodes
    (`intaglio.annotation`). `UnsupportedError` where nothing can be quantized, or something not trained.
    """
    return prepare_qat(captured, quantizer) if qat else prepare_captured(captured, quantizer)


def calibrate(prepared: Prepared | PreparedQat, data: Any, **options: Any) -> Ranges:
    """Statistics of every site over the data, which is read once.

    ``data``: an iterable of tensors, tuples, dictionaries or (inputs, label) pairs; a `DataLoader`; or a function that
    is called with the prepared model. Options: ``samples`` stops after that many; ``progress``: whether a bar is shown;
    ``nonfinite``: a NaN or an infinity is an "error", or "ignore" leaves it out; ``first_batch``: index of the first
    batch (default: the one after those the model has seen); ``group``: the processes that calibrate together (default:
    those of torch.distributed, where it is initialised). On an error the statistics are as they were before.

    Callbacks of patterns choose the parameters of their regions, producers first; their batches are kept in memory, and
    ``cache`` bytes of values between regions, beyond which these wait in a temporary file.

    A model prepared for training is calibrated as it evaluates, and its scales start from what is found.
    """
    if isinstance(prepared, PreparedQat):
        return calibrate_qat(prepared, data, **options)
    return Calibrator(prepared, data, **options).calibrate()


def convert(
    prepared: Prepared | PreparedQat, ranges: Ranges | Parameters | None = None, corrections: Corrections | None = None
) -> Reference:
    """Ranges (default: what the prepared model has seen) become parameters, weights and biases integers.

    `Parameters` are taken as they are, and no data is needed; only a weight's scale that its bias does not fit grows.
    ``corrections``: integers and biases that `correct` found better than the nearest ones. A trained model has its
    parameters already, and takes no others. Raises `CalibrationError` when a site has seen no data, `UnsupportedError`
    when an accumulator could overflow.
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
    """The reference of a model that another tool quantized, with its scales and zero points; nothing is calibrated.

    ``model``: what `convert_pt2e` gives, a program that was exported from it, or any module whose graph holds
    ``quantized_decomposed.quantize_per_tensor`` and its kin. ``example_inputs`` as in `capture`; a program has its own.
    Operators between dequantize and quantize that have no int8 kernel stay in float, as they are. Raises
    `UnsupportedError` for levels that are not taken over, such as those whose scales are computed while the model runs.
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


@overload
def compile(
    stage: Reference | Lowered,
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
def compile(stage: Reference | Lowered, backend: str = "native", **options: Any) -> Any:
    """Compile a reference model or an integer graph with one of the backends.

    Args:
        stage: a reference; the backends "native" and "c" take an integer graph too.
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
