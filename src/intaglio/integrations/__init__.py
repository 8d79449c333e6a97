"""Support for model libraries whose models are more than a forward: what `intaglio.quantize` returns for them keeps the
configuration, the methods and the class that the library's own tools expect.

A library is imported only for a model whose class comes from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, cast

from torch import nn

from intaglio.quant.calibrate.batches import Call, Use
from intaglio.runtime import QuantizedModel

__all__ = [
    "INTEGRATIONS",
    "AdaptedPart",
    "ExportExample",
    "Integration",
    "Quantize",
    "integration_for",
    "is_of_library",
]


@dataclass(frozen=True)
class ExportExample:
    """A call from which a module is captured.

    Attributes:
        inputs: positional arguments (default: the first batch).
        dynamic_shapes: dynamic dimensions, in the form that `torch.export` takes.
        checks: further calls, of other sizes, in which the captured graph must agree with the module.
        cached_inputs: inputs that hold results of earlier calls, as in `intaglio.stages.Quantizer`.
        is_part: whether the module is one of several that a model is made of, so that selectors may mean another one.
    """

    inputs: Any
    dynamic_shapes: Any
    checks: tuple[tuple[Any, ...], ...] = ()
    cached_inputs: Mapping[int, int | None] = field(default_factory=dict)
    is_part: bool = False


Quantize = Callable[[nn.Module, Any, ExportExample | None], QuantizedModel]
"""Quantizes a module with data and an example (default: the one of the user's call, or the first batch), with the other
arguments of the user's call of `intaglio.quantize`."""


class AdaptedPart(Protocol):
    """A submodule whose program takes other arguments than its forward.

    The program of the decoder of a model for images and text takes keys and values of earlier tokens in place of a
    cache, and returns those of new ones. That of a vision encoder takes positions in place of the sizes of images.

    Attributes:
        outside: paths of modules inside of the submodule that the code around it calls.
    """

    outside: Sequence[str]

    def recorded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments by name as which a call is recorded, or ``None`` for a call after earlier tokens.

        Raises:
            InputError: no program can take an argument.
        """

    def float_step(
        self, module: nn.Module, calls: Sequence[dict[str, Any]]
    ) -> tuple[nn.Module, Callable[[dict[str, Any]], tuple[Any, ...]], ExportExample]:
        """Return the module that is captured, a function that makes its arguments of a recorded call, and the call from
        which it is captured.

        Args:
            module: the float submodule.
            calls: recorded calls, at least one.

        Raises:
            UnsupportedError: the submodule cannot have such a program.
        """

    def run(self, program: QuantizedModel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the submodule's forward, computed by its program.

        Raises:
            InputError: the program cannot take an argument.
        """


class Integration(Protocol):
    """Interface of the modules that `INTEGRATIONS` names."""

    def quantize_model(self, model: nn.Module, data: Any, quantize: Quantize) -> Any:
        """Return the quantized model.

        Args:
            model: a float model of the library.
            data: calibration data, as the user gave them.
            quantize: quantizes one module of the model, or the model itself, as `intaglio.quantize` does for models of
                no library.
        """

    def reason_for_parts(self, model: nn.Module, data: Any) -> str | None:
        """Return why the parts of a model are quantized in a copy that runs in Python, or ``None``: the model can be
        one program, or several.

        Args:
            model: a float model of the library.
            data: calibration data, as the user gave them.
        """

    def further_calls(self, model: nn.Module, call: Call) -> list[Use]:
        """Return functions that use a model in ways that calls of forward do not show, such as steps of ``generate``.

        Args:
            model: a float model of the library, in evaluation mode.
            call: the call for the first batch.
        """

    def adapted_parts(self, model: nn.Module) -> Mapping[str, AdaptedPart]:
        """Return the submodules whose programs take other arguments than their forward, by path.

        Args:
            model: a float model of the library.
        """

    def install_hooks(self, model: nn.Module) -> None:
        """Install the hooks with which a model returns results of its submodules, if the library does so in the first
        call that asks for them.

        Args:
            model: a float model of the library, which is changed.
        """

    def has_collected_layers(self, module: nn.Module) -> bool:
        """Return whether a model around a module returns results of modules inside of it, which therefore cannot be one
        program.

        Args:
            module: a module of a float model of the library that was run.
        """

    def decoder_paths(self, model: nn.Module) -> tuple[str, ...]:
        """Return the paths of modules that are decoders, or "" for the model itself. They have the default settings of
        decoders.

        Args:
            model: a float model of the library.
        """


INTEGRATIONS = (
    ("sentence_transformers.SentenceTransformer", "intaglio.integrations.sentence_transformers"),
    ("transformers.PreTrainedModel", "intaglio.integrations.transformers"),
)
"""Base class of the models of a library, and the module that quantizes them; the first match counts."""


def integration_for(model: nn.Module) -> Integration | None:
    """Return the integration for a model's class, or ``None`` if its class comes from no library listed here."""
    home = next((home for base, home in INTEGRATIONS if is_of_library(model, base)), None)
    return None if home is None else cast(Integration, import_module(home))


def integrations_in(model: nn.Module) -> list[Integration]:
    """Return the integrations for the classes of all modules of a model, each once."""
    found = {base: home for base, home in INTEGRATIONS if any(is_of_library(one, base) for one in model.modules())}
    return [cast(Integration, import_module(home)) for home in found.values()]


def adapted_parts_of(model: nn.Module) -> Mapping[str, AdaptedPart]:
    """Return the submodules of a model whose programs take other arguments than their forward, by path."""
    integration = integration_for(model)
    return {} if integration is None else integration.adapted_parts(model)


def is_of_library(model: nn.Module, base: str) -> bool:
    """Return whether a model's class derives from a class of a library, without importing the library.

    Args:
        model: the model.
        base: the package and the name of the class: "transformers.PreTrainedModel".
    """
    return base in {f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}" for kind in type(model).__mro__}
