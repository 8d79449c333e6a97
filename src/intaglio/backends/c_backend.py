"""The C backend: sources, weights and build files that run without Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import fx

from intaglio.argument_checks import check_fields
from intaglio.backends.native_backend import CompileOptions, compile_native
from intaglio.backends.protocol import integer_graph
from intaglio.lower import Lowered
from intaglio.quant.qdq.convert import Reference
from intaglio.tracing.loops.while_loops import WhileLoop


@check_fields
@dataclass(frozen=True)
class COptions:
    """Options of the C backend.

    Args:
        folder: the folder to write to, which is created if it does not exist.
        isa: instruction sets (default: the best one of this machine).
    """

    folder: str | Path
    isa: str | tuple[str, ...] | None = None


class CBackend:
    """Compiles a model and exports it with `QuantizedModel.export_c`, which refuses float islands and host
    operators."""

    name = "c"
    Options = COptions
    remedy = "use a loop with a fixed number of iterations (a Python loop or scan), which is unrolled"

    def supports(self, op: fx.Node) -> str | None:
        """Refuse loops whose number of iterations depends on data. Islands are found only once the model is
        compiled."""
        return (
            "the number of iterations depends on data, and exported C code cannot run such a loop"
            if isinstance(op.target, WhileLoop)
            else None
        )

    def compile(self, stage: Reference | Lowered, options: COptions) -> Path:
        """Write the folder and return its path. Raise `UnsupportedError` for operators that C cannot run."""
        compile_native(integer_graph(stage), CompileOptions()).export_c(options.folder, isa=options.isa)
        return Path(options.folder)
