"""Print linear layers with float activations: a `struct FloatLinear` and its weights in panels."""

from __future__ import annotations

import numpy as np

from intaglio.codegen.context import Context
from intaglio.codegen.writer import Code
from intaglio.ir import DType, evaluate, numel
from intaglio.plan.plan_records import Partition
from intaglio.plan.scheduling.cost_model import F32_PANEL

WEIGHT_ELEMENT = {DType.S8: "int8_t", DType.F16: "uint16_t"}


def emit_linear_f32(code: Code, partition: Partition, context: Context) -> None:
    """Print a linear layer with float activations and float16 or int8 weights, one or one for each group of rows.

    Threads divide blocks of rows and panels of output channels.
    """
    op, constants, types = partition.anchor, context.graph.constants, context.graph.types
    x, weight, *rest = op.inputs
    group = op.attrs.get("group", 0)
    steps, rest = (rest[:1], rest[1:]) if group else ([], rest)
    ends, bias = ([name for name in rest if types[name].dtype is dtype] for dtype in (DType.I64, DType.F32))
    kind, shape = types[weight], types[op.output].shape
    experts = evaluate(types[ends[0]].shape[0], {}) if ends else 1
    shape_of_weight, _ = constants.layout(weight)
    element, inputs = WEIGHT_ELEMENT[kind.dtype], shape_of_weight[1]
    rows = shape_of_weight[0] // experts
    size = experts * (rows + -rows % F32_PANEL) * inputs * kind.dtype.bytes

    def pack() -> np.ndarray:
        return np.concatenate([pack_panels(part) for part in np.split(constants[weight], experts)])

    context.include("layers/linear_f32.h")
    code(f'static_assert(PANEL_F32 == {F32_PANEL}, "panels");')
    code("struct FloatLinear q = {};")
    code(f"q.x = (const float*){context.strided(x)[0]}, q.y = (float*){context.strided(op.output)[0]};")
    code(f"q.weight = {context.packed(size, (weight, experts), pack, element, 'weights')};")
    if kind.q is not None:
        code(f"q.scales = {context.constant(np.array(kind.q.scales, np.float32), 'float', 'scales')};")
    for name in steps:
        code(f"q.steps = {context.constant(pack_steps(constants[name]), 'float', 'steps')}, q.group = {group};")
    for name in bias:
        code(f"q.bias = {context.constant(constants[name], 'float', 'bias')};")
    code(f"q.rows = {context.dim(numel(shape[:-1]))}, q.inputs = {inputs}, q.outputs = {context.dim(shape[-1])};")
    if not ends:
        parts = sum(len(constants[name]) for name in steps)
        code("q.shares = r->shares;")
        code(f"float_linear<{parts}, {element}>(&q, thread, threads);")
        return
    at, (step,) = context.strided(ends[0])
    code(f"const int64_t* const ends = (const int64_t*){at};")
    code(f"float_linear_groups<{element}>(&q, ends, {context.dim(step)}, {experts}, thread, threads);")


def pack_panels(weight: np.ndarray) -> np.ndarray:
    """Pack a weight [N, K] as [panel, K, `F32_PANEL`]. The last panel is padded with zeros."""
    outputs, inputs = weight.shape
    filled = np.pad(weight, ((0, -outputs % F32_PANEL), (0, 0)))
    return np.ascontiguousarray(filled.reshape(-1, F32_PANEL, inputs).swapaxes(1, 2))


def pack_steps(steps: np.ndarray) -> np.ndarray:
    """Pack the steps [1 or 2, N, G] of groups as [panel, G, 1 or 2, `F32_PANEL`]. The last panel is padded with
    zeros."""
    parts, outputs, groups = steps.shape
    filled = np.pad(steps, ((0, 0), (0, -outputs % F32_PANEL), (0, 0)))
    return np.ascontiguousarray(filled.reshape(parts, -1, F32_PANEL, groups).transpose(1, 3, 0, 2))
