"""Compatibility with quantizers of PyTorch's export flow (torchao PT2E): their view of a graph and their annotations.

They are recognized by attributes and class names; torchao is not imported. Sources: documentation of
torchao.quantization.pt2e.quantizer (`Quantizer`, `QuantizationAnnotation`, `QuantizationSpec` and its variants).
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from intaglio.errors import UnsupportedError
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import graph_info, known_type, origin, tensor_type
from intaglio.fxgraph.nodes import operands, operator, record_of
from intaglio.fxgraph.reader_aliases import is_reader_alias
from intaglio.ir import DType, evaluate, symbols_of
from intaglio.quant.annotate.node_annotations import (
    ANNOTATION_KEY,
    Annotation,
    CustomObserver,
    QuantizedAs,
    SameAs,
)
from intaglio.quant.annotate.sites import Dynamic, Fixed, Observed
from intaglio.signature import DTYPES, TORCH_DTYPES
from intaglio.torch_private import FakeTensorMode

aten = torch.ops.aten
SOURCES: Mapping[str, tuple[type[nn.Module] | None, Any]] = {
    "aten.conv1d.default": (nn.Conv1d, F.conv1d),
    "aten.conv2d.default": (nn.Conv2d, F.conv2d),
    "aten.conv3d.default": (nn.Conv3d, F.conv3d),
    "aten.conv_transpose2d.input": (nn.ConvTranspose2d, F.conv_transpose2d),
    "aten.linear.default": (nn.Linear, F.linear),
    "aten.relu.default": (nn.ReLU, F.relu),
    "aten.hardtanh.default": (nn.Hardtanh, F.hardtanh),
    "aten.relu6.default": (nn.ReLU6, F.relu6),
    "aten.hardswish.default": (nn.Hardswish, F.hardswish),
    "aten.silu.default": (nn.SiLU, F.silu),
    "aten.gelu.default": (nn.GELU, F.gelu),
    "aten.leaky_relu.default": (nn.LeakyReLU, F.leaky_relu),
    "aten.tanh.default": (nn.Tanh, torch.tanh),
    "aten.sigmoid.default": (nn.Sigmoid, torch.sigmoid),
    "aten.max_pool2d.default": (nn.MaxPool2d, F.max_pool2d),
    "aten.avg_pool2d.default": (nn.AvgPool2d, F.avg_pool2d),
    "aten.adaptive_avg_pool2d.default": (nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d),
    "aten.flatten.using_ints": (nn.Flatten, torch.flatten),
    "aten.embedding.default": (nn.Embedding, F.embedding),
    "aten.cat.default": (None, torch.cat),
    "aten.matmul.default": (None, torch.matmul),
    "aten.add.Tensor": (None, python_operator.add),
    "aten.mul.Tensor": (None, python_operator.mul),
}
"""Module class and function that each overload comes from; some quantizers look for these."""
AS_TENSOR = {"aten.add.Scalar": aten.add.Tensor, "aten.mul.Scalar": aten.mul.Tensor, "aten.sub.Scalar": aten.sub.Tensor}
"""Overloads with a number, and the tensor overloads that torch.export uses for them."""


# -- graph view -------------------------------------------------------------------------------------------------------


def exported_view(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph in the form that torch.export produces.

    Nodes keep their names and their `NodeInfo`, and also get ``val``, ``nn_module_stack`` and ``source_fn_stack``.
    """
    view, known = copy_graph(module), graph_info(module)
    with FakeTensorMode():
        for node in list(view.graph.nodes):
            if is_reader_alias(node):
                node.replace_all_uses_with(node.args[0])
                view.graph.erase_node(node)
                continue
            kind = tensor_type(node)
            if kind is not None and kind.dtype in TORCH_DTYPES:
                shape = [evaluate(size, {n: known.sizes.get(n, 2) for n in symbols_of(size)}) for size in kind.shape]
                node.meta["val"] = torch.empty(shape, dtype=TORCH_DTYPES[kind.dtype])
            _to_export_overload(node)
            node.meta |= _export_meta(node, known.module_types)
    view.recompile()
    return view


def _to_export_overload(node: fx.Node) -> None:
    """Change a node to the overload that torch.export uses: tensor overloads, and flatten of the last axes."""
    if operator(node) in AS_TENSOR:
        node.target = AS_TENSOR[operator(node)]
    kept = _kept_axes(node) if operator(node) == "aten.reshape.default" else None
    if kept is not None:
        node.target, node.args = aten.flatten.using_ints, (node.args[0], kept)


def _kept_axes(node: fx.Node) -> int | None:
    """Return the number of leading axes that a reshape keeps if it merges all others into one, else ``None``."""
    before, after = known_type(node.args[0]).shape, known_type(node).shape
    kept = len(after) - 1
    return kept if len(before) > kept + 1 and before[:kept] == after[:kept] else None


MODULE = "torch.nn.modules.module.Module"


def _export_meta(node: fx.Node, types: Mapping[str, str]) -> dict[str, Any]:
    """Return torch.export metadata: the modules around a node, outermost first, and the module or function called."""
    if node.op != "call_function":
        return {}
    where = origin(node)
    path = where.path.partition("@")[0]
    parts = path.split(".") if path else []
    paths = ["", *(".".join(parts[: depth + 1]) for depth in range(len(parts)))]
    stack = {f"L__self__{one.replace('.', '_')}": (one, types.get(one, MODULE)) for one in paths}
    found: dict[str, Any] = {"nn_module_stack": stack}
    if where.source:
        found["stack_trace"] = where.source
    module, function = SOURCES.get(operator(node), (None, None))
    if function is not None:
        inner = stack[next(reversed(stack))][1]
        leaf = module is not None and inner == f"{module.__module__}.{module.__qualname__}"
        found["source_fn_stack"] = [(node.name, module if leaf else function)]
    return found


# -- annotations ------------------------------------------------------------------------------------------------------


def annotations_of(view: fx.GraphModule, annotator: Any) -> dict[fx.Node, Annotation]:
    """Run an annotator on a view, and return what it annotated, translated to `Annotation`, by node."""
    if hasattr(annotator, "transform_for_annotation"):
        annotator.transform_for_annotation(view)
    known = {node: node.name for node in view.graph.nodes}
    annotator.annotate(view)
    if hasattr(annotator, "validate"):
        annotator.validate(view)
    records = {
        node: node.meta[ANNOTATION_KEY] for node in view.graph.nodes if ANNOTATION_KEY in node.meta and node in known
    }
    if hasattr(annotator, "prepare_obs_or_fq_callback"):
        _replace_observers(view, annotator, records)
    return {node: _translated(node, record) for node, record in records.items()}


def _translated(node: fx.Node, record: Any) -> Annotation:
    if isinstance(record, Annotation):
        return record
    given = record.input_qspec_map or {}
    inputs = {value: _half_weight(node, value, spec) or _quantized_as(node, spec) for value, spec in given.items()}
    return Annotation(inputs, _quantized_as(node, record.output_qspec), record.allow_implicit_sharing)


def _half_weight(node: fx.Node, value: Any, spec: Any) -> QuantizedAs | None:
    """Return the annotation f16 for a layer's weight with a float16 spec, and ``None`` for everything else."""
    record, dtype = record_of(node), getattr(spec, "dtype", None)
    weight = None if record is None else record.roles.weight
    if dtype is not torch.float16 or weight is None or operands(node)[weight] is not value:
        return None
    return QuantizedAs("f16")


def _quantized_as(node: fx.Node, spec: Any) -> QuantizedAs | SameAs | CustomObserver | None:
    """Translate a torchao spec, recognized by the name of its class.

    A `DerivedQuantizationSpec` with int32 gives ``None``, because biases of int8 layers are always int32. Float specs
    of activations give ``None`` as well.

    Raises:
        UnsupportedError: the class of the spec is unknown.
    """
    if spec is None or isinstance(spec, (QuantizedAs, SameAs, CustomObserver)):
        return spec
    kind = type(spec).__name__
    if kind == "SharedQuantizationSpec":
        return SameAs(spec.edge_or_node)
    if kind == "DerivedQuantizationSpec" and spec.dtype is torch.int32:
        return None
    if kind == "FixedQParamsQuantizationSpec":
        datatype, span, shift = _datatype(node, spec, symmetric=False)
        return QuantizedAs(datatype, Fixed(float(spec.scale), int(spec.zero_point) + shift), span)
    if kind != "QuantizationSpec":
        raise UnsupportedError(node.name, operator(node), f"its annotation contains a {kind}, which is not supported")
    if hasattr(_class_and_arguments(spec.observer_or_fake_quant_ctr)[0], "convert"):
        return CustomObserver(spec.observer_or_fake_quant_ctr)
    if spec.dtype in (torch.float32, torch.float16, torch.bfloat16) and not spec.is_dynamic:
        return None
    if spec.is_dynamic:
        return QuantizedAs("u8", Dynamic("tensor"))
    symmetric = spec.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric)
    channels = spec.qscheme in (
        torch.per_channel_symmetric,
        torch.per_channel_affine,
        torch.per_channel_affine_float_qparams,
    )
    datatype, span, _ = _datatype(node, spec, symmetric)
    return QuantizedAs(datatype, _observed(spec.observer_or_fake_quant_ctr, symmetric), span, channels)


WEIGHTS = {(-128, 127): "s8", (-127, 127): "s8", (-8, 7): "s4", (-4, 3): "s3", (-2, 1): "s2"}
"""Datatype of a weight by its quantized range."""


def _datatype(node: fx.Node, spec: Any, symmetric: bool) -> tuple[str, tuple[int, int] | None, int]:
    """Return datatype, quantized range and the offset of the zero point; s8 activations become u8.

    The range is ``None`` if it is that of the datatype.
    """
    stored = DTYPES.get(spec.dtype)
    if stored not in (DType.U8, DType.S8):
        raise UnsupportedError(
            node.name,
            operator(node),
            f"its annotation asks for {spec.dtype}; allowed are uint8 and int8, and int32 for a bias",
        )
    most = (0, 255) if stored is DType.U8 else (-128, 127)
    low = most[0] if spec.quant_min is None else spec.quant_min
    high = most[1] if spec.quant_max is None else spec.quant_max
    if stored is DType.S8 and symmetric and (low, high) in WEIGHTS:
        return WEIGHTS[low, high], None, 0
    shift = 0 if stored is DType.U8 else 128
    span = (low + shift, high + shift)
    return "u8", None if span == (0, 255) else span, shift


OBSERVER_METHODS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "HistogramObserver": lambda given: "mse",
    "MinMaxObserver": lambda given: "minmax",
    "PerChannelMinMaxObserver": lambda given: "minmax",
    "MovingAverageMinMaxObserver": lambda given: f"ema:{given.get('averaging_constant', 0.01)}",
    "MovingAveragePerChannelMinMaxObserver": lambda given: "minmax",
    "FakeQuantize": lambda given: "ema:0.01",
    "FusedMovingAvgObsFakeQuantize": lambda given: "ema:0.01",
}
"""Range method by observer class; observers of all other classes are run themselves."""


def _class_and_arguments(make: Any) -> tuple[Any, dict[str, Any]]:
    """Return the class that an observer constructor wraps with ``with_args``, and the arguments."""
    given: dict[str, Any] = {}
    while hasattr(make, "p") or hasattr(make, "func"):
        make = getattr(make, "p", make)
        given |= getattr(make, "keywords", {})
        make = getattr(make, "func", make)
    return make, given


def _observed(make: Any, symmetric: bool) -> Observed:
    inner, given = _class_and_arguments(make)
    method = OBSERVER_METHODS.get(getattr(inner, "__name__", ""))
    if method is None:
        return Observed("minmax", symmetric, make)
    return Observed(method(given), symmetric)


# -- observer callback ------------------------------------------------------------------------------------------------


def _replace_observers(view: fx.GraphModule, annotator: Any, records: dict[fx.Node, Any]) -> None:
    """Let the annotator's ``prepare_obs_or_fq_callback`` replace observers, and change the records accordingly."""
    made: dict[Any, Any] = {}
    for node, record in records.items():
        for value, spec in (record.input_qspec_map or {}).items() if not isinstance(record, Annotation) else ():
            _observer(made, (value, node), spec)
        if not isinstance(record, Annotation):
            _observer(made, node, record.output_qspec)
    for place, observer in list(made.items()):
        while isinstance(observer, tuple):  # a shared spec refers to the place with the observer
            observer = made.get(observer[0])
        made[place] = observer
    before = dict(made)
    annotator.prepare_obs_or_fq_callback(view, made)
    for place, observer in made.items():
        if observer is before.get(place) or observer is None:
            continue
        spec = _quantized_as_observer(observer)
        if isinstance(place, tuple):
            records[place[1]].input_qspec_map[place[0]] = spec
        else:
            records[place].output_qspec = spec


def _observer(made: dict[Any, Any], place: Any, spec: Any) -> None:
    kind = type(spec).__name__
    if kind == "SharedQuantizationSpec":
        made[place] = (spec.edge_or_node,)
    elif kind == "QuantizationSpec":
        made[place] = spec.observer_or_fake_quant_ctr()


def _quantized_as_observer(observer: Any) -> QuantizedAs:
    """Return the annotation for a replacement observer: its fixed parameters, or the observer to run."""
    if hasattr(observer, "scale") and "FixedQParams" in type(observer).__name__:
        shift = 128 if observer.dtype is torch.int8 else 0
        return QuantizedAs("u8", Fixed(float(observer.scale), int(observer.zero_point) + shift))
    return QuantizedAs("u8", Observed("minmax", False, lambda: observer))
