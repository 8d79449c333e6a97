"""The C backend: sources, weights and build files that run without Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import fx

from intaglio.backends.native_backend import CompileOptions, compile_native
from intaglio.backends.protocol import integer_graph
from intaglio.lower import Lowered
from intaglio.quant.qdq.convert import Reference
from intaglio.tracing.while_loops import WhileLoop


@dataclass(frozen=True)
class COptions:
    """Options of the C backend: the folder that sources are written to, and their instruction sets.

    Args:
        folder: the folder, which is made if there is none.
        isa: instruction sets (default: the best of this machine).
    """

    folder: str | Path
    isa: str | tuple[str, ...] | None = None


class CBackend:
    """Writes what `QuantizedModel.export_c` writes. Float islands and host operators are refused."""

    name = "c"
    Options = COptions
    remedy = "write a loop of a fixed count, which is unrolled (scan, or one in Python)"

    def supports(self, op: fx.Node) -> str | None:
        """Refuse loops that run as long as the data says; islands are found once the model is compiled."""
        return "such a loop is driven by Python, which exported C has not" if isinstance(op.target, WhileLoop) else None

    def compile(self, stage: Reference | Lowered, options: COptions) -> Path:
        """Write the folder and return its path. Raises `UnsupportedError` for what C cannot run."""
        compile_native(integer_graph(stage), CompileOptions()).export_c(options.folder, isa=options.isa)
        return Path(options.folder)
