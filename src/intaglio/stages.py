"""The stages of quantization, one function each, in the order in which `intaglio.quantize` calls them.

`capture`, `prepare`, `equalize`, `calibrate`, `correct`, `convert`, `requantize`, `compile`: each returns a value that
can be printed, kept and handed to the next stage by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor, nn
from torch.export import ExportedProgram

from intaglio import build
from intaglio.backends import OnnxFile, to_onnx
from intaglio.backends.images import byte_inputs
from intaglio.errors import InputError
from intaglio.ir import Schedule
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
from intaglio.runtime import Coverage, QuantizedModel, example_of
from intaglio.signature import bind
from intaglio.tracing import capture
from intaglio.tracing.captured import Captured, expect
from intaglio.tune import made_up, one_image, search

if TYPE_CHECKING:
    from intaglio.backends.inductor import InductorModel

__all__ = [
    "Annotations",
    "Captured",
    "Corrections",
    "Coverage",
    "Lowered",
    "OnnxFile",
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
    "to_onnx",
]

POLICIES = ("plan", "fallback")
"""What a call of a shape that was not planned does."""


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
    *,
    backend: Literal["native"] = "native",
    isa: str | Iterable[str] | None = None,
    tune: Any = False,
    on_new_shape: str = "plan",
    float_model: nn.Module | None = None,
) -> QuantizedModel: ...


@overload
def compile(stage: Reference, *, backend: Literal["inductor"], example_inputs: Any = None) -> InductorModel: ...


def compile(
    stage: Reference | Lowered,
    *,
    backend: str = "native",
    isa: str | Iterable[str] | None = None,
    tune: Any = False,
    on_new_shape: str = "plan",
    float_model: nn.Module | None = None,
    example_inputs: Any = None,
) -> QuantizedModel | InductorModel:
    """The native program of a reference model or an integer graph; or what TorchInductor makes of a reference.

    ``isa``: instruction sets to build for, of "avx512vnni", "avx2", "portable" (default: the best of this machine).
    The model runs the best of them that this machine runs; `QuantizedModel.save` writes them all, and
    ``load(path, trust=True)`` picks. Raises `BuildError` when this machine runs none of them.

    ``tune``: look for faster schedules (tiles, how work is divided) by the clock, for as many threads as PyTorch takes
    now: some seconds, once for every kind of layer, then they are remembered on disk. ``True`` measures with a batch
    of one; or give the arguments of a typical call, as a tuple, a dictionary by name, or the only one. Results are the
    same bits either way.

    ``on_new_shape`` as in `quantize`; "fallback" takes ``float_model``.

    ``backend="inductor"`` takes a reference and, of the other arguments, only ``example_inputs``: a typical call, as
    for ``tune``, to compile for at once (default: a batch of one, or the first call if more than the batch is free).
    """
    if backend == "inductor":
        from intaglio.backends.inductor import InductorModel  # it imports TorchInductor, which takes seconds

        expect(stage, Reference, "compile")
        assert isinstance(stage, Reference)
        _native_only(
            isa=isa,
            tune=tune or None,
            on_new_shape=None if on_new_shape == "plan" else on_new_shape,
            float_model=float_model,
        )
        return InductorModel(stage, _example(stage, example_inputs))
    if backend != "native":
        raise InputError("backend", None, f"no backend {backend!r}; there are native and inductor")
    check_policy(on_new_shape, float_model)
    lowered = requantize(stage) if isinstance(stage, Reference) else stage
    expect(lowered, Lowered, "compile")
    quantized = build.compile(lowered, isa=isa, schedules=searched_schedules(lowered, isa, tune))
    if on_new_shape == "fallback" and float_model is not None:
        return quantized.fall_back_to(float_model)
    return quantized


def check_policy(on_new_shape: str, float_model: nn.Module | None) -> None:
    """`InputError` for a policy there is not, or that lacks the model it needs."""
    if on_new_shape not in POLICIES:
        raise InputError("on_new_shape", None, f"no policy {on_new_shape!r}; there are {' and '.join(POLICIES)}")
    if on_new_shape == "fallback" and float_model is None:
        raise InputError("on_new_shape", None, "nothing to fall back to", remedy="give float_model=")


def _native_only(**given: Any) -> None:
    """`InputError` for what another backend would ignore."""
    if ignored := [name for name, value in given.items() if value is not None]:
        raise InputError("compile", None, f"{', '.join(ignored)}: of the native backend only")


def _example(reference: Reference, given: Any) -> Sequence[Tensor] | None:
    """Tensors of a typical call: those given, or of a batch of one; nothing if more than the batch is free."""
    if given is not None:
        return example_of(reference.signature, given, byte_inputs(reference.module))
    try:
        return made_up(reference.signature)
    except InputError:
        return None


def searched_schedules(
    lowered: Lowered,
    isa: str | Iterable[str] | None,
    tune: Any,
    example: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None,
) -> dict[str, Schedule] | None:
    """What the clock says, if it is asked. ``example``: arguments of a call, of which ``tune=True`` takes one image."""
    if tune is False:
        return None
    signature, bytes_too = lowered.signature, lowered.graph.byte_inputs()
    inputs: Sequence[Tensor]
    if tune is not True:
        inputs = example_of(signature, tune, bytes_too)
    elif example is None:
        inputs = made_up(signature)
    else:
        inputs = one_image(signature, bind(signature, *example), bytes_too)
    return search(lowered, build.choose(isa)[0], inputs)
