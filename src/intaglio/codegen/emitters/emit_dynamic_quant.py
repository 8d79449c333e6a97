"""Print dynamic quantization."""

from __future__ import annotations

from intaglio.codegen.context import Context
from intaglio.codegen.emitters.emit_steps import source_strides, strides_read
from intaglio.codegen.writer import Code
from intaglio.ir import numel
from intaglio.plan.plan_records import Partition


def emit_quantize_rows(code: Code, partition: Partition, context: Context) -> None:
    """Print a dynamic quantize of a float tensor with any strides.

    The results are a row-major u8 tensor and an f32 scale per row (token). In "tensor" mode, all rows of a batch entry
    have the same scale.
    """
    op = partition.anchor
    quantized, scales = op.outputs
    shape = context.graph.types[quantized].shape
    alike = numel(shape[1:-1]) if op.attrs["mode"] == "tensor" else 1
    context.include("sequences/rows.h")
    code(f"const struct Image out = {context.image(quantized)};")
    code(f"const int64_t* s = {source_strides(code, op.inputs[0], context)};")
    code(f"const int64_t strides[] = {{{', '.join(strides_read(len(shape), rows=True))}}};")
    ends = f"(const float*){context.strided(op.inputs[0])[0]}, strides, &out, (float*){context.strided(scales)[0]}"
    code(f"quantize_rows({ends}, {context.dim(alike)}, r->shares, thread, threads);")
