"""Each verb as one readable function. `quantize` is all of them in order."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor, nn
from torch.export import ExportedProgram

from intaglio import build
from intaglio.backends import to_onnx
from intaglio.backends.images import byte_inputs
from intaglio.build import load
from intaglio.errors import InputError
from intaglio.ir import Schedule
from intaglio.lower import Lowered, requantize
from intaglio.ops import OpDef
from intaglio.quant.annotate.node_annotations import Annotator
from intaglio.quant.calibrate.batches import Call, binder_for, peek
from intaglio.quant.calibrate.calibration_loop import calibrate as calibrate_prepared
from intaglio.quant.calibrate.callbacks import Calibrator
from intaglio.quant.calibrate.distributed import Group
from intaglio.quant.calibrate.prepare import Prepared, annotate
from intaglio.quant.calibrate.prepare import prepare as prepare_captured
from intaglio.quant.calibrate.ranges import Ranges
from intaglio.quant.correct.calibration_cache import SAMPLES, keep
from intaglio.quant.correct.correct_weights import correct
from intaglio.quant.correct.corrections import Corrections
from intaglio.quant.correct.equalize import equalize
from intaglio.quant.frontends.from_qdq import from_qdq as from_captured
from intaglio.quant.qat import PreparedQat, calibrate_qat, convert_qat, prepare_qat
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.convert import convert as convert_prepared
from intaglio.quant.qdq.parameters import Parameters
from intaglio.quant.recipes.image import Image
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.user_patterns import QuantizerPattern
from intaglio.runtime import QuantizedModel, example_of
from intaglio.signature import bind
from intaglio.tracing import capture
from intaglio.tracing.already_quantized import refuse_quantized
from intaglio.tracing.captured import Captured, expect
from intaglio.tune import Criterion, Start, Tuned, autotuned, compare, made_up, one_image, search

if TYPE_CHECKING:
    from intaglio.backends.inductor import InductorModel

__all__ = [
    "annotate",
    "autotune",
    "calibrate",
    "capture",
    "compare",
    "compile",
    "convert",
    "correct",
    "equalize",
    "from_qdq",
    "load",
    "prepare",
    "quantize",
    "requantize",
    "to_onnx",
]

POLICIES = ("plan", "fallback")
"""What a call of a shape that was not planned does."""
Selectors = str | Iterable[str]
logger = logging.getLogger("intaglio")


def quantize(
    model: nn.Module,
    data: Any = None,
    *,
    example_inputs: Any = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    parameters: Parameters | str | Path | None = None,
    skip: Selectors = (),
    only: Selectors = (),
    input: Image | Mapping[str, Image] | None = None,
    patterns: Iterable[QuantizerPattern | str] = (),
    operators: Iterable[OpDef] = (),
    skip_first: bool = False,
    skip_last: bool = False,
    outputs: str = "float",
    int8_buffers: bool | Selectors = (),
    samples: int | None = None,
    dynamic_shapes: Any = None,
    isa: str | Iterable[str] | None = None,
    tune: Any = False,
    on_new_shape: str = "plan",
    progress: bool | None = None,
) -> QuantizedModel:
    """A float model and a few batches of data -> an int8 model that runs on the CPU.

    ``data``: any iterable of batches (tensors, tuples, dictionaries, (inputs, label) pairs), a `DataLoader`, or a
    function that is called with the model to calibrate, which leaves out `equalize` and `correct`: these look several
    times at the first 256 samples, which are kept. ``example_inputs``: a tuple of arguments (default: the first batch).
    ``recipe``: a `Recipe`, its name ("accurate", or "int8_dynamic", which needs no data), its entries as a mapping, or
    the path of its TOML file. ``parameters``: those of an earlier conversion (`Reference.parameters`), or the path of
    their file; nothing is calibrated then, and ``data`` gives the example inputs only. ``skip`` and ``only`` are
    selectors (`Recipe`). ``input``: what the bytes of images stand for (an `Image`; of several inputs, a mapping by
    name), so that uint8 images are taken too. ``patterns``, ``operators``, ``skip_first`` and ``skip_last`` as in
    `Quantizer`; ``outputs="int8"`` gives results as integers with scale and zero point, and ``int8_buffers`` names
    buffers that the model changes and that are kept as integers. ``samples`` stops calibration after that many.
    ``dynamic_shapes`` as torch.export takes them (default: the batch is free). ``on_new_shape``: what a call of other
    shapes does than were planned, by `QuantizedModel.warm` or else by the first call: "plan" them, in microseconds, or
    "fallback" to the float model, which the int8 model then refers to. ``isa`` and ``tune`` as in `compile`;
    ``tune=True`` measures with the first entry of the example inputs' batch. The model is never changed. Raises an
    `IntaglioError` that says what to do.
    """
    _policy(on_new_shape, model)
    refuse_quantized(model)
    (args, kwargs), data = _first_call(model, data, example_inputs)
    captured = capture(model, args, example_kwargs=kwargs, dynamic_shapes=dynamic_shapes)
    if not isinstance(tune, bool):  # before the work, not after it
        example_of(captured.signature, tune, range(len(captured.signature.inputs)) if input else ())
    selected = Recipe.given(recipe).with_selection(skip, only)
    quantizer = Quantizer(
        selected,
        input or {},
        patterns=patterns,
        operators=operators,
        skip_first=skip_first,
        skip_last=skip_last,
        outputs=outputs,
        int8_buffers=int8_buffers,
    )
    prepared = prepare(captured, quantizer)
    given: Parameters | None = quantizer.recipe.parameters
    if parameters is not None:
        given = parameters if isinstance(parameters, Parameters) else Parameters.load(parameters)
    lowered = requantize(_calibrated(prepared, data, samples, progress) if given is None else convert(prepared, given))
    chosen = _schedules(lowered, isa, tune, (args, kwargs))
    quantized = build.compile(lowered, isa=isa, schedules=chosen)
    logger.info("%r\n%s", quantized, quantized.coverage)
    return quantized.fall_back_to(model) if on_new_shape == "fallback" else quantized


def autotune(
    model: nn.Module,
    data: Any,
    evaluate: Callable[[Any], Any],
    *,
    max_drop: float = 0.01,
    relative: bool = True,
    evaluations: int = 20,
    example_inputs: Any = None,
    recipe: Recipe | Mapping[str, Any] | str | Path | None = None,
    skip: Selectors = (),
    only: Selectors = (),
    input: Image | Mapping[str, Image] | None = None,
    patterns: Iterable[QuantizerPattern | str] = (),
    operators: Iterable[OpDef] = (),
    samples: int | None = None,
    dynamic_shapes: Any = None,
    isa: str | Iterable[str] | None = None,
    progress: bool | None = None,
) -> Tuned:
    """An int8 model whose metric is near the float model's, with as few operators left in float as that takes.

    ``evaluate``: a function of a model, the float one or an int8 one, that returns a number; higher is better, so of a
    loss return minus the loss. It is called without gradients, at most ``evaluations`` times, the float model first.
    The metric may be lower than that by ``max_drop``, a share of it, or with ``relative=False`` a difference.

    If what `quantize` gives is good enough, that is all. Otherwise operators are ranked by what rounding them alone
    does (`compare`); the worst are left in float, twice as many each time until the metric holds, then as few of those
    as will do. Everything is calibrated and corrected once; trials only convert and compile. Where nothing that was
    tried holds, the best is returned, with a warning; `Tuned.reached` tells. With an ``evaluate`` that always says the
    same of the same model, so is the result.

    ``data`` are batches, which a function of the model cannot be; other arguments as in `quantize`. What they leave in
    float stays there. The float model is never changed. Raises `InputError` that names ``evaluate`` when it fails or
    returns anything but one finite number.
    """
    refuse_quantized(model)
    criterion = Criterion(evaluate, max_drop, relative, evaluations)
    (args, kwargs), data = _first_call(model, data, example_inputs)
    captured = capture(model, args, example_kwargs=kwargs, dynamic_shapes=dynamic_shapes)
    selected = Recipe.given(recipe).with_selection(skip, only)
    quantizer = Quantizer(selected, input or {}, patterns=patterns, operators=operators)
    prepared = prepare(captured, quantizer)
    looked_at, data = _kept(prepared, data, samples)
    if not looked_at:
        raise InputError(
            "data",
            None,
            "a function that runs the model, and operators are ranked over batches",
            remedy="pass an iterable of batches",
        )
    if selected.parameters is not None or not prepared.observers:
        reference = convert(prepared, selected.parameters)
    else:
        reference = _converted(prepared, looked_at, data, samples, progress)
    exact = copy.deepcopy(model).eval() if any(part.training for part in model.modules()) else model
    return autotuned(Start(captured, quantizer, reference, looked_at), criterion, exact, isa)


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

    A model prepared for training is calibrated as it evaluates, and its scales start from what is found.
    """
    if isinstance(prepared, PreparedQat):
        return calibrate_qat(prepared, data, **options)
    return calibrate_prepared(prepared, data, **options)


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


def _policy(on_new_shape: str, float_model: nn.Module | None) -> None:
    """`InputError` for a policy there is not, or that lacks the model it needs."""
    if on_new_shape not in POLICIES:
        raise InputError("on_new_shape", None, f"no policy {on_new_shape!r}; there are {' and '.join(POLICIES)}")
    if on_new_shape == "fallback" and float_model is None:
        raise InputError("on_new_shape", None, "nothing to fall back to", remedy="give float_model=")


def _first_call(model: nn.Module, data: Any, example_inputs: Any) -> tuple[Call, Any]:
    """The example inputs, or else the first batch, and data that still starts with it."""
    if example_inputs is None:
        first, data = peek(data)
        return binder_for(model)(first), data
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,), {}), data


def _calibrated(prepared: Prepared, data: Any, samples: int | None, progress: bool | None) -> Reference:
    """Of data that is read once; where everything is quantized while the model runs, of none."""
    if not prepared.observers:
        return convert(prepared)
    return _converted(prepared, *_kept(prepared, data, samples), samples, progress)


def _kept(prepared: Prepared, data: Any, samples: int | None) -> tuple[list[Any], Any]:
    """Batches to be looked at several times, and data that still starts with them."""
    return keep(data, prepared.signature, SAMPLES if samples is None else min(samples, SAMPLES))


def _converted(
    prepared: Prepared, looked_at: list[Any], data: Any, samples: int | None, progress: bool | None
) -> Reference:
    """Equalized, calibrated, corrected; a function that runs the model can only calibrate."""
    if not looked_at and Group.current().size == 1:
        return convert(prepared, Calibrator(prepared, data, samples=samples, progress=progress).calibrate())
    prepared = equalize(prepared, looked_at)
    ranges = Calibrator(prepared, data, samples=samples, progress=progress).calibrate()
    return convert(prepared, ranges, correct(prepared, ranges, looked_at))


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
    _policy(on_new_shape, float_model)
    lowered = requantize(stage) if isinstance(stage, Reference) else stage
    expect(lowered, Lowered, "compile")
    quantized = build.compile(lowered, isa=isa, schedules=_schedules(lowered, isa, tune))
    if on_new_shape == "fallback" and float_model is not None:
        return quantized.fall_back_to(float_model)
    return quantized


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


def _schedules(
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
