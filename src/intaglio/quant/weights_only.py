"""Layers whose weights alone are integers: a quarter of the bytes, computed in float32 on what they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from intaglio.capture.nodes import constant_node, is_constant, operands, operator, origin, record_of, tensor_type
from intaglio.ir import DType, TensorType
from intaglio.quant.recipe import Recipe, Setting
from intaglio.quant.weights import channel_scales


def layers(module: fx.GraphModule, recipe: Recipe, classes: Mapping[str, str]) -> dict[fx.Node, Setting]:
    """Convolutions and linear layers that the recipe says it of, each with a float32 weight that never changes."""
    found = {}
    for node in module.graph.nodes:
        record = record_of(node) if operator(node) else None
        if record is None or record.roles.weight is None or record.roles.outputs:
            continue
        setting, weight = recipe.setting(origin(node), classes), operands(node)[record.roles.weight]
        stored = weight is not None and is_constant(weight) and tensor_type(weight).dtype is DType.F32
        if stored and setting.quantize and setting.activations == "float":
            found[node] = setting
    return found


def store_integers(module: fx.GraphModule, recipe: Recipe, classes: Mapping[str, str], dequantize: Any) -> int:
    """Their weights as int8 and a scale per output channel, behind a dequantize; how many. Symmetric, absmax."""
    found = layers(module, recipe, classes)
    for node, setting in found.items():
        weight = operands(node)[record_of(node).roles.weight]
        values = getattr(module, str(weight.target)).detach().numpy()
        scales = channel_scales(values.reshape(len(values), -1), setting.weight)
        rows = values.reshape(len(values), -1) / scales[:, None]
        levels = np.clip(np.rint(rows), setting.weight.qmin, setting.weight.qmax).astype(np.int8).reshape(values.shape)
        names = []
        for label, array in (("levels", levels), ("scale", scales), ("zero_point", np.zeros(len(scales), np.int64))):
            name = f"{weight.target}_{label}"
            if not hasattr(module, name):
                module.register_buffer(name, torch.from_numpy(np.ascontiguousarray(array)))
            names.append(constant_node(module, name, f"{weight.meta.get('path', weight.target)}.{label}"))
        ends = setting.weight.qmin, setting.weight.qmax, torch.int8
        with module.graph.inserting_before(node):
            real = module.graph.call_function(dequantize, (*names, 0, *ends))
        real.meta = {"type": TensorType(tuple(values.shape), DType.F32), "origin": origin(node)}
        node.replace_input_with(weight, real)
    return len(found)
