"""Weight-only quantization: weights stored as integers or float16, computed with in float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio.fxgraph.node_info import constant_path, inherit_info, known_type, origin, tensor_type, update_info
from intaglio.fxgraph.nodes import constant_node, is_constant, layer_operands, operands, record_of
from intaglio.ir import DType, TensorType
from intaglio.quant.annotate.regions import Region
from intaglio.quant.qdq.weight_grid import channel_scales, group_of, weight_grid
from intaglio.quant.recipes.choices import ActivationMode, WeightScales
from intaglio.quant.recipes.settings import Setting


def find_weight_only(regions: Iterable[Region], settings: Mapping[fx.Node, Setting]) -> dict[str, Setting]:
    """Return the weight-only layers by name.

    These are convolutions and linear layers outside of regions, with float activations and a constant float32 weight.
    """
    taken, found = {node for region in regions for node in region.nodes}, {}
    for node, setting in settings.items():
        record = record_of(node)
        if node in taken or record is None or record.roles.weight is None or record.roles.outputs:
            continue
        weight = operands(node)[record.roles.weight]
        stored = weight is not None and is_constant(weight) and known_type(weight).dtype is DType.F32
        if stored and setting.quantize and setting.activations == ActivationMode.FLOAT:
            found[node.name] = setting
    return found


def store_weights(module: fx.GraphModule, found: Mapping[str, Setting], dequantize: Any) -> list[str]:
    """Replace the weights of weight-only layers by quantized constants and a dequantize.

    Calls that use the same weight share its constants.

    Args:
        module: the graph, which is changed in place.
        found: layer -> setting.
        dequantize: torch's dequantize_per_channel.

    Returns:
        A remark for each datatype.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    for name, setting in found.items():
        node = nodes[name]
        weight = layer_operands(node).weight
        group = group_of(origin(node), setting)
        with module.graph.inserting_before(node):
            if setting.weight.storage is DType.F16:
                half = _f16_weight(module, weight)
                real = module.graph.call_function(torch.ops.aten._to_copy.default, (half,), {"dtype": torch.float32})
            else:
                ends = *setting.weight.stored(group), torch.int8
                real = module.graph.call_function(
                    dequantize, (*_quantized_weight(module, weight, setting, group), 0, *ends)
                )
        inherit_info(real, node, type=tensor_type(weight))
        node.replace_input_with(weight, real)
    counts = Counter(setting.weight.name for setting in found.values())
    return [f"weights only: {count} layers compute in float32 on {name} weights" for name, count in counts.items()]


def _quantized_weight(module: fx.GraphModule, weight: fx.Node, setting: Setting, group: int) -> tuple[fx.Node, ...]:
    """Return the quantized values, a scale for each output channel, and zero points, which are all 0."""
    values, kind = _float_weight(module, weight), setting.weight
    rows = values.reshape(1 if setting.weights == WeightScales.TENSOR else len(values), -1)
    scales = np.resize(channel_scales(rows, kind, group), len(values))
    grid = weight_grid(values, scales, kind, group)
    quantized = _add_weight_constant(module, weight, "levels", grid.as_s8(grid.nearest(values)))
    update_info(quantized, type=TensorType(values.shape, DType.S8, packing=kind.packing(group)))
    zeros = np.zeros(len(values), np.int64)
    return (
        quantized,
        _add_weight_constant(module, weight, "scale", scales),
        _add_weight_constant(module, weight, "zero_point", zeros),
    )


def _f16_weight(module: fx.GraphModule, weight: fx.Node) -> fx.Node:
    """Return the weight rounded to float16 and saturated, as torch's fp16 linear does."""
    values, largest = _float_weight(module, weight), np.finfo(np.float16).max
    return _add_weight_constant(module, weight, "f16", np.clip(values, -largest, largest).astype(np.float16))


def _float_weight(module: fx.GraphModule, weight: fx.Node) -> np.ndarray:
    values: np.ndarray = getattr(module, str(weight.target)).detach().numpy()
    return values


def _add_weight_constant(module: fx.GraphModule, weight: fx.Node, label: str, array: np.ndarray) -> fx.Node:
    """Return a constant made from a weight; it is registered once."""
    name = f"{weight.target}_{label}"
    if not hasattr(module, name):
        module.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)))
    return constant_node(module, name, f"{constant_path(weight, weight.target)}.{label}")
