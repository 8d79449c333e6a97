"""The ONNX backend: a file of standard operators, for ONNX Runtime, OpenVINO and others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import fx

from intaglio.backends.onnx.onnx_export import OnnxFile, Sums, export_onnx
from intaglio.lower import Lowered
from intaglio.quant.qdq.convert import Reference
from intaglio.tracing.captured import expect
from intaglio.tracing.while_loops import SCAN_INSTEAD, WhileLoop


@dataclass(frozen=True)
class OnnxOptions:
    """Options of the ONNX backend: the file, and the type that a convolution passes to the sum behind it.

    Args:
        path: the file. Tensors of more than 2 GB are beside it, in ``<path>.data``.
        sums: "levels": u8 between the bounds beyond which the sum saturates, without which ONNX Runtime computes that
            convolution in float32; it rounds once more than the reference does, by half a step of the sum and half a
            step of its other operand at most. "float": as in the reference.
    """

    path: str | Path
    sums: Sums = "levels"


class OnnxBackend:
    """Writes a reference as ONNX. Needs the extra ``onnx``."""

    name = "onnx"
    Options = OnnxOptions
    remedy = SCAN_INSTEAD

    def supports(self, op: fx.Node) -> str | None:
        """Refuse loops that run as long as the data says; operators that ONNX lacks are found while exporting."""
        return "ONNX files of a loop with a body are not written" if isinstance(op.target, WhileLoop) else None

    def compile(self, stage: Reference | Lowered, options: OnnxOptions) -> OnnxFile:
        """Write the file and return what is in it."""
        expect(stage, Reference, "compile")
        assert isinstance(stage, Reference)
        return export_onnx(stage, options.path, sums=options.sums)
