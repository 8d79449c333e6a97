"""The ONNX backend: a file of standard operators, for ONNX Runtime, OpenVINO and other engines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import fx

from intaglio.argument_checks import check_fields
from intaglio.backends.onnx.onnx_export import OnnxFile, Sums, export_onnx
from intaglio.lower import Lowered
from intaglio.quant.qdq.convert import Reference
from intaglio.tracing.captured import expect
from intaglio.tracing.loops.while_loops import SCAN_INSTEAD, WhileLoop


@check_fields
@dataclass(frozen=True)
class OnnxOptions:
    """Options of the ONNX backend.

    Args:
        path: the file. Tensors of more than 2 GB are stored next to it, in ``<path>.data``.
        sums: element type of a convolution's result that is added to another value. "uint8" quantizes it within
            the range in which the sum does not saturate; without this, ONNX Runtime computes the convolution in
            float32. Its error is at most half a step of the sum plus half a step of the other operand. "float" leaves
            it in float32, as in the reference.
    """

    path: str | Path
    sums: Sums = "uint8"


class OnnxBackend:
    """Writes a reference as an ONNX file. It needs the extra ``onnx``."""

    name = "onnx"
    Options = OnnxOptions
    remedy = SCAN_INSTEAD

    def supports(self, op: fx.Node) -> str | None:
        """Refuse loops whose number of iterations depends on data. Operators that ONNX lacks are found during the
        export."""
        return (
            "the number of iterations depends on data, and the ONNX export cannot write such a loop"
            if isinstance(op.target, WhileLoop)
            else None
        )

    def compile(self, stage: Reference | Lowered, options: OnnxOptions) -> OnnxFile:
        """Write the file and return a description of it."""
        expect(stage, Reference, "compile")
        assert isinstance(stage, Reference)
        return export_onnx(stage, options.path, sums=options.sums)
