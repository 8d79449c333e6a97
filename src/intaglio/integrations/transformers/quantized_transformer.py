"""`QuantizedTransformer`: a `QuantizedModel` with the surface of a `PreTrainedModel`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from intaglio.argument_checks import check_arguments
from intaglio.errors import InputError
from intaglio.integrations.transformers.folders import MODEL_FILE, write_configs
from intaglio.runtime import QuantizedModel
from intaglio.torch_private import pytree

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

RESULT_SWITCHES = ("output_attentions", "output_hidden_states", "use_cache")
"""Arguments of forward that request more results. ``False`` requests none, whatever the configuration says."""


class QuantizedTransformer(QuantizedModel):
    """Runs the int8 program of a model of the library ``transformers``.

    Its class is also a subclass of the float model's class, with the same name, so ``isinstance`` and class attributes
    such as ``main_input_name`` are those of the float model. Everything that a `QuantizedModel` has comes first.
    Methods of the float class that need its weights or submodules raise `AttributeError`.

    Attributes:
        float_class: class of the float model.
        forward_parameters: the parameters of its forward by name.
        config: a copy of the float model's configuration.
        generation_config: a copy of the float model's generation configuration, or ``None``.
        name_or_path: the name under which the float model was loaded.
    """

    # The library evaluates the annotations of its models' classes, so none of them is a name of the library.
    float_class: ClassVar[type[Any]]
    forward_parameters: ClassVar[Mapping[str, inspect.Parameter]]
    config: Any
    generation_config: Any
    name_or_path: str

    @property
    def device(self) -> torch.device:
        """Return the CPU, the device on which int8 models run."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """Return float32, the data type of the results that are floats."""
        return torch.float32

    def run_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of forward.

        Arguments that the example did not have are accepted where they change nothing: ``None``, the default of
        forward, the value of the configuration, ``False`` for an additional result, and an ``attention_mask`` of ones.
        ``return_dict=False`` returns a tuple.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.

        Raises:
            InputError: an argument is missing, or the example did not have it and it would change the result.
        """
        given = self._named(args, kwargs)
        as_tuple = given.get("return_dict") is False
        example_args, example_kwargs = pytree.tree_unflatten(
            [None] * self.signature.in_tree.num_leaves, self.signature.in_tree
        )
        known = {*self.signature.names[: len(example_args)], *example_kwargs}
        if extra := {name: value for name, value in given.items() if name not in known}:
            self._check_ignorable(extra)
            given = {name: value for name, value in given.items() if name in known}
        result = QuantizedModel.forward(self, **given)
        return result.to_tuple() if as_tuple and hasattr(result, "to_tuple") else result

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        names = [name for name, one in self.forward_parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
        if len(args) > len(names):
            problem = f"it has {len(args)} positional arguments, but forward takes {len(names)}"
            raise InputError("call", None, problem, remedy="pass arguments by their names")
        given = dict(zip(names, args, strict=False))
        if twice := sorted(given.keys() & kwargs.keys()):
            problem = f"{', '.join(twice)} is given by position and by name"
            raise InputError("call", None, problem, remedy="pass arguments by their names")
        return {**given, **kwargs}

    def _check_ignorable(self, extra: Mapping[str, Any]) -> None:
        """Raise `InputError` unless arguments that the example did not have change nothing."""
        for name, value in extra.items():
            if self._is_ignorable(name, value):
                continue
            shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise InputError(
                f"argument '{name}'",
                None,
                f"it is {shown:.60}, but the examples had no {name}",
                remedy=f"leave it out, or quantize again with batches that have '{name}'",
            )

    def _is_ignorable(self, name: str, value: Any) -> bool:
        """Return whether an argument that the example did not have changes nothing."""
        if isinstance(value, torch.Tensor):
            return name == "attention_mask" and bool((value == 1).all())
        if value is None or name == "return_dict" or (name in RESULT_SWITCHES and value is False):
            return True
        parameter = self.forward_parameters.get(name)
        if parameter is not None and parameter.default is not parameter.empty and value == parameter.default:
            return True
        return name not in RESULT_SWITCHES and hasattr(self.config, name) and value == getattr(self.config, name)

    @check_arguments
    def save_pretrained(self, save_directory: str | Path, *, safe_serialization: bool = True) -> None:
        """Write the model to a folder for `intaglio.integrations.transformers.from_pretrained`.

        The folder gets ``config.json``, the int8 model as ``model.intaglio`` and, if there is one,
        ``generation_config.json``. Files of the same names are replaced.

        Args:
            save_directory: the folder, which is created if it does not exist.
            safe_serialization: has no effect, because the file is always safe to load. Other libraries pass it.

        Raises:
            ArtifactError: a file cannot be written.
        """
        folder = Path(save_directory)
        write_configs(folder, self.float_class.__name__, self.config, self.generation_config)
        self.save(folder / MODEL_FILE)

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
        return _new_object, (self.float_class,), self.__getstate__()


def with_surface(
    quantized: QuantizedModel,
    float_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None = None,
) -> QuantizedTransformer:
    """Give a quantized model the surface of a class of ``transformers``.

    Args:
        quantized: the int8 model, whose class changes.
        float_class: class of the float model.
        forward_parameters: the parameters of its forward by name.
        config: configuration of the float model.
        generation_config: its generation configuration.
    """
    quantized.__class__ = quantized_class(float_class)
    assert isinstance(quantized, QuantizedTransformer)
    quantized.config = copy.deepcopy(config)
    quantized.generation_config = copy.deepcopy(generation_config)
    quantized.name_or_path = config.name_or_path or ""
    return quantized


def quantized_class(float_class: type[PreTrainedModel]) -> type[QuantizedTransformer]:
    """Return the class of quantized models of a float class, the same one every time. It has the name of the float
    class, by which pipelines look models up."""
    if float_class in _CLASSES:
        return _CLASSES[float_class]

    @functools.wraps(float_class.forward)
    def forward(self: QuantizedTransformer, *args: Any, **kwargs: Any) -> Any:
        return self.run_forward(args, kwargs)

    members = {
        "__doc__": QuantizedTransformer.__doc__,
        "__module__": __name__,
        "float_class": float_class,
        "forward_parameters": dict(list(inspect.signature(float_class.forward).parameters.items())[1:]),
        "forward": forward,
    }
    return _CLASSES.setdefault(float_class, type(float_class.__name__, (QuantizedTransformer, float_class), members))


_CLASSES: dict[Any, type[QuantizedTransformer]] = {}
"""Classes that `quantized_class` has made, by float class."""


def _new_object(float_class: type[PreTrainedModel]) -> QuantizedTransformer:
    """Return an object without state, which copies and unpickled models start as."""
    kind = quantized_class(float_class)
    return kind.__new__(kind)
