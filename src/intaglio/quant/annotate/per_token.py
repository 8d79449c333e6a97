"""Dynamic quantization of activations: their sites, and the quantize and dequantize operators of a torch graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from operator import getitem
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from intaglio import numerics
from intaglio.fxgraph.node_info import info, inherit_info, known_type, origin
from intaglio.fxgraph.nodes import operator
from intaglio.fxgraph.overloads import register_operators
from intaglio.ir import DType, TensorType
from intaglio.ops import OpDef
from intaglio.ops.dynamic_quant import per_token_qparams, quantize_dynamic, scales_shape
from intaglio.quant.annotate.sites import Dynamic, Site
from intaglio.quant.recipes.choices import Role
from intaglio.quant.recipes.settings import Setting

if TYPE_CHECKING:
    from intaglio.quant.annotate.regions import Annotations, Region

UNSCALED_DEQUANTIZE_ARGUMENTS = 1.0, numerics.ROW_ZERO, 0, 255, torch.uint8
"""Arguments of torch's dequantize_per_tensor that return dynamically quantized values in units of their scales."""
QUANTIZE_ROWS_TARGET = "intaglio.quantize_rows.default"
DEQUANTIZE_ROWS_TARGET = "intaglio.dequantize_rows.default"


def dynamic_refusal(record: OpDef, setting: Setting) -> str | None:
    """Return why the activations of an operator cannot be quantized dynamically; ``None`` if they can."""
    if not (record.is_linear_layer or record.recurrent):
        return "dynamic quantization is supported for linear and recurrent layers only"
    if setting.activation.name != "u8" or not setting.weight.native:
        kinds = f"{setting.activation.name} activations and {setting.weight.name} weights"
        return f"the recipe has {kinds}; dynamic quantization takes u8 activations and integer weights of up to 8 bits"
    return None


def dynamic_sites(regions: Iterable[Region], name_of: Callable[[fx.Node], str]) -> Iterator[Site]:
    """Yield one site for each dynamically quantized value and mode, which all layers that read it share."""
    for region in regions:
        for value in region.activations() if region.dynamic else ():
            mode, q = region.x_role, per_token_qparams(value.name)
            yield Site(
                f"{name_of(value)}:{mode}",
                value.name,
                mode,
                Dynamic(mode),
                DType.U8,
                q.qmin,
                q.qmax,
                q.axis,
                origin(value),
            )


def insert_dynamic_qdq(graph: fx.Graph, annotations: Annotations) -> None:
    """Insert quantize and dequantize nodes for what dynamic layers read, once for all layers that read a value."""
    nodes, ops = {node.name: node for node in graph.nodes}, per_token_operators()
    readers: dict[tuple[fx.Node, Role], list[fx.Node]] = {}
    for region in (region for region in annotations.regions if region.dynamic):
        anchor = nodes[region.anchor.name]
        readers.setdefault((anchor.args[0], region.x_role), []).append(anchor)
    for (x, mode), anchors in readers.items():
        quantized, scales = _insert_quantize(graph, ops, x, mode)
        with graph.inserting_after(scales):
            real = graph.call_function(ops.dequantize_rows.default, (quantized, scales))
        inherit_info(real, anchors[0] if len(anchors) == 1 else x, type=info(x).type)
        for anchor in anchors:
            anchor.replace_input_with(x, real)


def _insert_quantize(graph: fx.Graph, ops: Any, x: fx.Node, mode: Role) -> tuple[fx.Node, fx.Node]:
    """Insert a dynamic quantize after a value, and return the nodes of quantized values and scales."""
    shape = known_type(x).shape
    with graph.inserting_after(x):
        pair = graph.call_function(ops.quantize_rows.default, (x, mode.value))
    inherit_info(pair, x)
    with graph.inserting_after(pair):
        scales = graph.call_function(getitem, (pair, 1))
    with graph.inserting_after(pair):
        quantized = graph.call_function(getitem, (pair, 0))
    inherit_info(quantized, x, type=TensorType(shape, DType.U8, per_token_qparams(scales.name)))
    inherit_info(scales, x, type=TensorType(scales_shape(shape), DType.F32))
    return quantized, scales


def dynamic_operands(node: fx.Node | None) -> tuple[fx.Node, fx.Node] | None:
    """Return the quantized values and scales that a dynamic dequantize reads; ``None`` for any other node."""
    return tuple(node.args) if node is not None and operator(node) == DEQUANTIZE_ROWS_TARGET else None


@functools.cache
def per_token_operators() -> Any:
    """Return the PyTorch operators, registered on first use; they call the reference implementation."""
    return register_operators(OPERATORS)


def _quantize_rows(x: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, scales = quantize_dynamic(x.detach().numpy(), mode)
    return torch.from_numpy(quantized), torch.from_numpy(np.ascontiguousarray(scales))


def _dequantize_rows(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (quantized.to(torch.int32) - numerics.ROW_ZERO).to(torch.float32) * scales


def _fake_quantize_rows(x: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x, dtype=torch.uint8), x.new_empty([*x.shape[:-1], 1])


def _fake_dequantize_rows(quantized: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(quantized, dtype=torch.float32)


OPERATORS: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "quantize_rows": ("(Tensor x, str mode) -> (Tensor, Tensor)", _quantize_rows, _fake_quantize_rows),
    "dequantize_rows": ("(Tensor quantized, Tensor scales) -> Tensor", _dequantize_rows, _fake_dequantize_rows),
}
"""Name -> schema, implementation, and implementation for fake tensors."""


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return decompositions of the operators into ATen operators, with bit-identical results."""
    ops = per_token_operators()
    return {ops.quantize_rows.default: _quantize_rows_in_aten, ops.dequantize_rows.default: _dequantize_rows}


def _quantize_rows_in_aten(x: torch.Tensor, mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `quantize_dynamic` in ATen.

    It divides two tensors, because PyTorch computes a number divided by a tensor with a reciprocal.
    """
    largest = x.abs().amax(-1, keepdim=True)
    peaks = torch.where(largest.isfinite(), largest.clamp_min(float(numerics.MIN_ROW_ABSMAX)), torch.nan)
    if mode == "tensor" and x.dim() > 2:
        peaks = peaks.amax(list(range(1, x.dim())), keepdim=True).expand_as(peaks)
    known, count = peaks.isfinite(), torch.full_like(peaks, numerics.ROW_STEPS)
    steps = torch.where(known, x, 0.0) * (count / torch.where(known, peaks, 1.0))
    quantized = numerics.round_clamp(steps, -numerics.ROW_STEPS, numerics.ROW_STEPS) + numerics.ROW_ZERO
    return quantized.to(torch.uint8), peaks / count
