"""The Inductor backend: int8 calls of oneDNN with generated C++ between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from intaglio.argument_checks import check_fields
from intaglio.backends.channel_zero_points import byte_inputs
from intaglio.errors import InputError
from intaglio.lower import Lowered
from intaglio.quant.qdq.convert import Reference
from intaglio.runtime import copied_inputs
from intaglio.tracing.captured import expect
from intaglio.tracing.loops.while_loops import SCAN_INSTEAD, WhileLoop
from intaglio.tune import random_sample

if TYPE_CHECKING:
    from intaglio.backends.inductor.inductor_model import InductorModel


@check_fields
@dataclass(frozen=True)
class InductorOptions:
    """Options of the TorchInductor backend.

    Args:
        example_inputs: arguments of a typical call, which the first program is compiled for, as a tuple, a dictionary
            by name, or the only argument (default: a batch of one, or the first call if more than the batch is
            dynamic).
    """

    example_inputs: Any = None


class InductorBackend:
    """Compiles a reference with TorchInductor."""

    name = "inductor"
    Options = InductorOptions
    remedy = SCAN_INSTEAD

    def supports(self, op: fx.Node) -> str | None:
        """Refuse loops whose number of iterations depends on data."""
        return (
            "the number of iterations depends on data, and Inductor cannot compile such a loop in int8"
            if isinstance(op.target, WhileLoop)
            else None
        )

    def compile(self, stage: Reference | Lowered, options: InductorOptions) -> InductorModel:
        """Return a model whose first program is compiled, unless dynamic sizes are unknown."""
        from intaglio.backends.inductor.inductor_model import (
            InductorModel,  # imported here, because importing TorchInductor takes seconds
        )

        expect(stage, Reference, "compile")
        assert isinstance(stage, Reference)
        return InductorModel(stage, _example(stage, options.example_inputs))


def _example(reference: Reference, given: Any) -> Sequence[Tensor] | None:
    """Return the tensors of the given call, or of a batch of one. Return ``None`` if more than the batch is dynamic."""
    if given is not None:
        return copied_inputs(reference.signature, given, byte_inputs(reference.module))
    try:
        return random_sample(reference.signature)
    except InputError:
        return None
