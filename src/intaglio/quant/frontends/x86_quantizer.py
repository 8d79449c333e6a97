"""Reimplementation of torchao's `X86InductorQuantizer` on `intaglio.annotation`.

Setters, precedence and positions of quantize and dequantize follow the original.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from intaglio.argument_checks import check_arguments
from intaglio.errors import SelectorError
from intaglio.fusion.matcher import match
from intaglio.fusion.pattern import op, seq, wildcard
from intaglio.fxgraph.fx_graph_view import FxGraphView
from intaglio.fxgraph.node_info import info, origin, tensor_type
from intaglio.fxgraph.nodes import activations, arguments, known_record, operands, operator
from intaglio.fxgraph.overloads import ADD_TARGET, CONV2D_TARGET, LINEAR_TARGET, RELU_TARGET
from intaglio.quant.annotate.node_annotations import (
    Annotation,
    CustomObserver,
    QuantizedAs,
    SameAs,
    annotate_node,
    annotation_of,
)
from intaglio.quant.annotate.sites import Dynamic, Observed
from intaglio.quant.qat.eval_graph import BatchNormMark
from intaglio.quant.recipes.choices import ActivationMode, WeightScales
from intaglio.quant.recipes.selectors import matches
from intaglio.quant.recipes.settings import DEFAULT, Setting

GELU = "aten.gelu.default"
CONV_EPILOGUES = (
    RELU_TARGET,
    "aten.hardtanh.default",
    "aten.relu6.default",
    "aten.hardswish.default",
    "aten.silu.default",
)
LINEAR_EPILOGUES = (RELU_TARGET, "aten.leaky_relu.default", "aten.tanh.default", GELU)
CONV1D, MATMUL, MUL_TARGET = "aten.conv1d.default", "aten.matmul.default", "aten.mul.Tensor"
X86_PATTERNS = (
    op(RELU_TARGET, op(ADD_TARGET, seq(CONV2D_TARGET), wildcard("extra"), commutative=True)),
    op(ADD_TARGET, seq(CONV2D_TARGET), wildcard("extra"), commutative=True),
    seq(CONV2D_TARGET, CONV_EPILOGUES),
    seq(CONV1D, RELU_TARGET),
    seq((CONV2D_TARGET, CONV1D)),
    op(RELU_TARGET, op(ADD_TARGET, seq(LINEAR_TARGET), wildcard("extra"), commutative=True)),
    op(ADD_TARGET, seq(LINEAR_TARGET), wildcard("extra"), commutative=True),
    seq(LINEAR_TARGET, LINEAR_EPILOGUES),
    seq(LINEAR_TARGET),
    op(MATMUL),
    op(MUL_TARGET),
)
"""Patterns that run as one int8 operator, in order of precedence."""
MAX_POOL, AVG_POOL = "aten.max_pool2d.default", "aten.avg_pool2d.default"
POOL_TARGET, CAT_TARGET, FLATTEN = "aten.adaptive_avg_pool2d.default", "aten.cat.default", "aten.flatten.using_ints"
SHARING_TARGETS = (MAX_POOL, CAT_TARGET, AVG_POOL, POOL_TARGET, FLATTEN)
"""Operators that are quantized only if their input is, with the input's parameters for the output."""
DEFAULT_TARGETS = (*SHARING_TARGETS, CONV1D, CONV2D_TARGET, LINEAR_TARGET, MUL_TARGET)
TYPES: Mapping[Any, str] = {
    nn.Conv1d: CONV1D,
    F.conv1d: CONV1D,
    nn.Conv2d: CONV2D_TARGET,
    F.conv2d: CONV2D_TARGET,
    nn.Linear: LINEAR_TARGET,
    F.linear: LINEAR_TARGET,
    nn.MaxPool2d: MAX_POOL,
    F.max_pool2d: MAX_POOL,
    nn.AvgPool2d: AVG_POOL,
    F.avg_pool2d: AVG_POOL,
    nn.AdaptiveAvgPool2d: POOL_TARGET,
    F.adaptive_avg_pool2d: POOL_TARGET,
    torch.cat: CAT_TARGET,
    nn.Flatten: FLATTEN,
    torch.flatten: FLATTEN,
    torch.matmul: MATMUL,
    torch.bmm: MATMUL,  # capture replaces products of computed operands by matmul
    torch.mm: MATMUL,
    torch.mul: MUL_TARGET,
}
"""Overload of each module class and function."""


@check_arguments
def get_symmetric_quantization_config(
    is_per_channel: bool = True, is_qat: bool = False, is_dynamic: bool = False, reduce_range: bool = False
) -> Setting:
    """Return a setting with symmetric weights and affine u8 activations.

    Args:
        is_per_channel: one weight scale per output channel instead of one per tensor.
        is_qat: observe moving averages instead of histograms.
        is_dynamic: quantize activations at run time.
        reduce_range: quantize activations to 0..127, for CPUs without VNNI, whose instructions saturate.
    """
    return Setting(
        quantize=True,
        method="ema:0.01" if is_qat else "mse",
        weights="channel" if is_per_channel else "tensor",
        bits=7 if reduce_range else 8,
        activations="tensor" if is_dynamic else "static",
    )


@check_arguments
def get_default_x86_inductor_quantization_config(
    is_qat: bool = False, is_dynamic: bool = False, reduce_range: bool = False
) -> Setting:
    """Return `get_symmetric_quantization_config` with weight scales per channel, by torchao's name and arguments.

    Args:
        is_qat: observe moving averages instead of histograms.
        is_dynamic: quantize activations at run time.
        reduce_range: quantize activations to 0..127, for CPUs without VNNI, whose instructions saturate.
    """
    return get_symmetric_quantization_config(True, is_qat, is_dynamic, reduce_range)


def get_linear_dynamic_fp16_config() -> Setting:
    """Return a weight-only setting: weights are stored as float16, and everything is computed in float32.

    The name is torchao's, although nothing is dynamic.
    """
    return Setting(quantize=True, activations="float", weights_dtype="f16")


class X86Quantizer:
    """Quantizes convolutions and linear layers with fused operators, then operators that share parameters.

    Settings are given by module name, by type of module or function, or globally, in this order of precedence. ``None``
    leaves operators in float. Types other than those in `TYPES` are ignored with a warning. So is a setting that
    combines training or dynamic quantization with an earlier one without it. All setters return the quantizer. Names
    that end in ``_qconfig``, and `get_global_quantization_config`, are those of torchao for the same methods.
    """

    def __init__(self) -> None:
        self._names: dict[str, Setting | None] = {}
        self._types: dict[str, Setting | None] = {}
        self._rest: Setting | None = None

    @check_arguments
    def set_global(self, config: Setting | None) -> X86Quantizer:
        """Set the setting of all operators without another one, except products of two activations."""
        if self._is_compatible(config):
            self._rest = config
        return self

    def get_global(self) -> Setting | None:
        """Return the setting of `set_global`."""
        return self._rest

    @check_arguments
    def set_module_name(self, name: str, config: Setting | None) -> X86Quantizer:
        """Set the setting of one module; a fused pattern must be inside it as a whole."""
        if self._is_compatible(config):
            self._names[name] = config
        return self

    @check_arguments
    def set_module_type(self, kind: type[nn.Module], config: Setting | None) -> X86Quantizer:
        """Set the setting of a module class; functions with the same overload share it."""
        return self._set_type(kind, config)

    @check_arguments
    def set_function_type(self, function: Callable[..., Any], config: Setting | None) -> X86Quantizer:
        """Set the setting of a function such as `torch.matmul`; module classes with the same overload share it."""
        return self._set_type(function, config)

    get_global_quantization_config = get_global
    set_module_name_qconfig = set_module_name
    set_module_type_qconfig = set_module_type
    set_function_type_qconfig = set_function_type

    @check_arguments
    def annotate(self, module: fx.GraphModule) -> None:
        """Annotate a graph by module names, then types, then the global setting; earlier annotations are kept."""
        view, ends = FxGraphView(module.graph), set[fx.Node]()
        for config, covers in self._scopes(module):
            for row in X86_PATTERNS:
                for node in module.graph.nodes:
                    hit = match(row, node, view) if node.op == "call_function" else None
                    if hit is None or not covers(hit.nodes) or any(map(annotation_of, hit.nodes)):
                        continue
                    if operator(node) != MUL_TARGET or _equal_shapes(node):
                        _annotate_row(hit.nodes, dict(hit.bound).get("extra"), config)
                        ends |= {node} if _output_annotation(config) is not None else set()
            for node in module.graph.nodes:
                if operator(node) in SHARING_TARGETS and annotation_of(node) is None and covers((node,)):
                    ends |= {node} if _annotate_sharing(node, config, ends) else set()

    def _scopes(self, module: fx.GraphModule) -> Iterator[tuple[Setting | None, Callable[[Sequence[fx.Node]], bool]]]:
        """Yield settings in order of precedence, each with a predicate for the nodes of a match."""
        for name, config in self._names.items():
            if not any(matches(name, origin(node), {}) is not None for node in module.graph.nodes):
                problem = "the model has no operator in a module of this name"
                raise SelectorError(f"module {name!r}", None, problem, remedy="give a path of model.named_modules()")
            yield config, partial(_all_inside, name)
        for kind, config in self._types.items():
            yield config, partial(_has_one, (kind,))
        if self._rest is not None:
            yield self._rest, partial(_has_one, DEFAULT_TARGETS)

    def _set_type(self, kind: Any, config: Setting | None) -> X86Quantizer:
        target = next((target for known, target in TYPES.items() if known is kind), None)
        if target is None:
            warnings.warn(
                f"{getattr(kind, '__name__', kind)}: this type cannot be quantized; the setting is ignored",
                stacklevel=4,
            )
        elif self._is_compatible(config):
            self._types[target] = config
        return self

    def _is_compatible(self, config: Setting | None) -> bool:
        """Return whether a setting can be combined with the earlier ones.

        Either all train or none does, and all that quantize activations agree on static or dynamic quantization.
        """
        given = [one for one in (config, *self._names.values(), *self._types.values(), self._rest) if one is not None]
        when = {one.activations or "static" for one in given} - {"float"}
        mixed = config is not None and (len(when) > 1 or len(set(map(_is_for_training, given))) > 1)
        if mixed:
            warnings.warn(
                "this setting is ignored, because an earlier one differs in training or in dynamic scales", stacklevel=5
            )
        return not mixed


def _all_inside(name: str, nodes: Sequence[fx.Node]) -> bool:
    return all(matches(name, origin(node), {}) is not None for node in nodes)


def _has_one(kinds: Collection[str], nodes: Sequence[fx.Node]) -> bool:
    return sum(operator(node) in kinds for node in nodes) == 1


def _is_for_training(config: Setting) -> bool:
    """Return whether a setting is for training."""
    return (config.method or "").startswith("ema")


def _annotate_row(nodes: Sequence[fx.Node], extra: fx.Node | None, config: Setting | None) -> None:
    """Annotate one match, root first: the operands of its layer, and the other operand of an addition to a convolution.

    The other operand of an addition to a linear layer stays float for accuracy. In training the output of a layer with
    a folded batch norm is quantized for all its readers.
    """
    root, anchor = nodes[0], nodes[-1]
    normed = any(isinstance(mark, BatchNormMark) for mark in info(anchor).marks)
    for node in nodes:
        inputs: dict[fx.Node, QuantizedAs | SameAs | CustomObserver | None] = {}
        if config is not None and node is anchor:
            inputs = _operand_annotations(anchor, config)
        elif config and extra and (operator(node), operator(anchor)) == (ADD_TARGET, CONV2D_TARGET):
            inputs = {extra: _output_annotation(config)}
        trained = node is root and normed and config is not None and _is_for_training(config)
        annotate_node(node, Annotation(inputs, _output_annotation(config) if trained else None))


def _operand_annotations(
    anchor: fx.Node, config: Setting
) -> dict[fx.Node, QuantizedAs | SameAs | CustomObserver | None]:
    """Return the annotations of the operands of a layer or a product."""
    found: dict[fx.Node, QuantizedAs | SameAs | CustomObserver | None] = {}
    for one in activations(anchor):
        if one is not None:
            found[one] = _activation_annotation(config)
    weight = known_record(anchor).roles.weight
    if weight is not None and operands(anchor)[weight] is not None:
        effective = config.with_defaults(DEFAULT)
        found[operands(anchor)[weight]] = QuantizedAs(
            effective.weight.name, Observed("absmax", True), channels=effective.weights != WeightScales.TENSOR
        )
    return found


def _activation_annotation(config: Setting | None) -> QuantizedAs | None:
    """Return the annotation of activations under a setting; ``None`` if they stay in float."""
    if config is None or config.activations == ActivationMode.FLOAT:
        return None
    effective = config.with_defaults(DEFAULT)
    if effective.activations in (ActivationMode.TOKEN, ActivationMode.TENSOR):
        return QuantizedAs(spec=Dynamic(effective.activations))
    return QuantizedAs(effective.activation.name, Observed(effective.method or "mse"))


def _output_annotation(config: Setting | None) -> QuantizedAs | None:
    """Return the annotation of an output for all its readers; ``None`` for float and for dynamic quantization."""
    annotation = _activation_annotation(config)
    return None if annotation is None or isinstance(annotation.spec, Dynamic) else annotation


def _equal_shapes(node: fx.Node) -> bool:
    kinds = [kind for one in operands(node)[:2] if one is not None and (kind := tensor_type(one)) is not None]
    return len(kinds) == 2 and kinds[0].shape == kinds[1].shape


def _annotate_sharing(node: fx.Node, config: Setting | None, ends: Collection[fx.Node]) -> bool:
    """Annotate input and output with shared parameters if every operand is the output of a quantized match."""
    read = list(dict.fromkeys(arguments(node)["tensors"] if operator(node) == CAT_TARGET else node.all_input_nodes[:1]))
    if (annotation := _output_annotation(config)) is None:
        annotate_node(node, Annotation())
        return False
    if any(one not in ends for one in read):
        if operator(node) == MAX_POOL:
            warnings.warn(
                f"{node.name}: the input of this pool is not quantized, so the pool is not either", stacklevel=2
            )
        return False
    if operator(node) == FLATTEN and not any(operator(user) in (*DEFAULT_TARGETS, MATMUL) for user in node.users):
        return False
    first, *others = read
    shared = SameAs((first, node))
    annotate_node(node, Annotation({first: annotation, **dict.fromkeys(others, shared)}, shared))
    return True
