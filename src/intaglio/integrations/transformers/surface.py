"""`TransformerSurface`: what a quantized model has of a `PreTrainedModel` beside its forward."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from intaglio.errors import InputError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

STATE_OF_GENERATE = "is_first_iteration"
"""Argument that `generate` passes to forwards that take any keyword, which do not read it."""


class TransformerSurface:
    """Members of a `PreTrainedModel` that a quantized model keeps.

    Attributes:
        base_class: class that runs the model.
        float_class: class of the float model.
        forward_parameters: the parameters of its forward by name.
        positional_names: those of them that may be given by position.
        config: a copy of the float model's configuration.
        generation_config: a copy of the float model's generation configuration, or ``None``.
        name_or_path: the name under which the float model was loaded.
    """

    # The library evaluates the annotations of its models' classes, so none of them is a name of the library.
    base_class: ClassVar[type[Any]]
    float_class: ClassVar[type[Any]]
    forward_parameters: ClassVar[Mapping[str, inspect.Parameter]]
    positional_names: ClassVar[Sequence[str]]
    config: Any
    generation_config: Any
    name_or_path: str

    @property
    def device(self) -> torch.device:
        """Return the CPU, the device on which int8 models run."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Return float32, in which the model computes and keeps its cache, also if its logits have another type."""
        return torch.float32

    def run_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of forward with these positional and keyword arguments."""
        raise NotImplementedError

    def keep_configuration(self, config: PreTrainedConfig, generation_config: GenerationConfig | None) -> None:
        """Store copies of the configurations of the float model."""
        self.config, self.generation_config = copy.deepcopy(config), copy.deepcopy(generation_config)
        self.name_or_path = config.name_or_path or ""

    def named_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name.

        Raises:
            InputError: there are too many, or one is given twice.
        """
        names = self.positional_names
        if len(args) > len(names):
            problem = f"it has {len(args)} positional arguments, but forward takes {len(names)}"
            raise InputError("call", None, problem, remedy="pass arguments by their names")
        given = dict(zip(names, args, strict=False))
        if twice := sorted(given.keys() & kwargs.keys()):
            problem = f"{', '.join(twice)} is given by position and by name"
            raise InputError("call", None, problem, remedy="pass arguments by their names")
        return {**given, **kwargs}

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Self:
        """Raise `InputError`: a class does not load int8 models, because its name is that of a float class."""
        raise InputError(
            "from_pretrained",
            None,
            "an int8 model is not loaded by its class",
            remedy="call intaglio.integrations.transformers.from_pretrained(folder)",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return how to copy and pickle an object whose class is made at run time."""
        return _new_object, (self.base_class, self.float_class), self.__getstate__()


def quantized_class(base: type[Any], float_class: type[PreTrainedModel]) -> type[Any]:
    """Return the class of quantized models of a float class, the same one every time. It has the name of the float
    class, by which pipelines look models up.

    Args:
        base: class that runs the model, a `TransformerSurface`.
        float_class: class of the float model.
    """
    if (base, float_class) in _CLASSES:
        return _CLASSES[base, float_class]

    @functools.wraps(float_class.forward)
    def forward(self: TransformerSurface, *args: Any, **kwargs: Any) -> Any:
        return self.run_forward(args, kwargs)

    parameters = dict(list(inspect.signature(float_class.forward).parameters.items())[1:])
    members = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "base_class": base,
        "float_class": float_class,
        "forward_parameters": parameters,
        "positional_names": [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD],
        "forward": forward,
    }
    return _CLASSES.setdefault((base, float_class), type(float_class.__name__, (base, float_class), members))


_CLASSES: dict[Any, type[Any]] = {}
"""Classes that `quantized_class` has made, by base and float class."""


def kept_tokens(length: int, kept: Any) -> torch.Tensor:
    """Return the indices, int64, of the tokens whose logits a call returns.

    Args:
        length: number of tokens of the call.
        kept: its argument ``logits_to_keep``: the number of the last tokens, 0 for all, or a tensor of indices.

    Raises:
        InputError: it is something else, or has an index of no token.
    """
    if isinstance(kept, int):
        found = range(length)[-kept if kept else 0 :]
        return torch.arange(found.start, found.stop, device="cpu")
    if isinstance(kept, torch.Tensor) and kept.dim() == 1 and kept.dtype in (torch.int64, torch.int32):
        indices = kept.long()
        if ((-length <= indices) & (indices < length)).all():
            return indices % length
    shown = f"{kept.dtype} {kept.tolist()}" if isinstance(kept, torch.Tensor) else repr(kept)
    problem = f"it is {shown:.60}, but the call has {length} tokens"
    remedy = "pass the number of the last tokens, or a tensor of indices with one axis"
    raise InputError("argument 'logits_to_keep'", None, problem, remedy=remedy)


def kept_logits(logits: torch.Tensor, kept: Any) -> torch.Tensor:
    """Return the logits [batch, tokens, vocabulary] of the tokens that `kept_tokens` returns."""
    return logits[:, kept_tokens(logits.shape[1], kept)]


def _new_object(base: type[Any], float_class: type[PreTrainedModel]) -> Any:
    """Return an object without state, which copied and unpickled models start as."""
    kind = quantized_class(base, float_class)
    return object.__new__(kind)
