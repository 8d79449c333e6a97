"""`QuantizedTransformer`: a `QuantizedModel` with the surface of a `PreTrainedModel`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from intaglio.argument_checks import check_arguments
from intaglio.errors import InputError
from intaglio.integrations.transformers.folders import MODEL_FILE, write_configs
from intaglio.integrations.transformers.surface import (
    STATE_OF_GENERATE,
    TransformerSurface,
    kept_logits,
    quantized_class,
)
from intaglio.runtime import QuantizedModel
from intaglio.torch_private import pytree

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

RESULT_SWITCHES = ("output_attentions", "output_hidden_states", "use_cache")
"""Arguments of forward that request more results. ``False`` requests none, whatever the configuration says."""


class QuantizedTransformer(TransformerSurface, QuantizedModel):
    """Runs the int8 program of a model of the library ``transformers``.

    Its class is also a subclass of the float model's class, with the same name, so ``isinstance`` and class attributes
    such as ``main_input_name`` are those of the float model. Everything that a `QuantizedModel` has comes first.
    Methods of the float class that need its weights or submodules raise `AttributeError`.
    """

    def run_forward(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of forward.

        Arguments that the example did not have are accepted where they change nothing: ``None``, the default of
        forward, the value of the configuration, ``False`` for an additional result, an ``attention_mask`` of ones, and
        ``position_ids`` from 0. ``logits_to_keep`` selects from the result.
        ``return_dict=False`` returns a tuple.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.

        Raises:
            InputError: an argument is missing, or the example did not have it and it would change the result.
        """
        given = self.named_arguments(args, kwargs)
        as_tuple = given.get("return_dict") is False
        example_args, example_kwargs = pytree.tree_unflatten(
            [None] * self.signature.in_tree.num_leaves, self.signature.in_tree
        )
        known = {*self.signature.names[: len(example_args)], *example_kwargs}
        extra = {name: value for name, value in given.items() if name not in known}
        kept = extra.pop("logits_to_keep", None)
        if "attention_mask" in known and given.get("attention_mask") is None and "input_ids" in given:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        self._check_ignorable(extra, _is_full(given.get("attention_mask")))
        self._check_length(given.get("input_ids"))
        result = QuantizedModel.forward(self, **{name: value for name, value in given.items() if name in known})
        if kept is not None and "logits" in result:
            result["logits"] = kept_logits(result["logits"], kept)
        return result.to_tuple() if as_tuple and hasattr(result, "to_tuple") else result

    def _check_ignorable(self, extra: Mapping[str, Any], is_full: bool) -> None:
        """Raise `InputError` unless arguments that the example did not have change nothing.

        Args:
            extra: the arguments.
            is_full: whether no token is padding.
        """
        for name, value in extra.items():
            if self._is_ignorable(name, value) or (is_full and _are_default_positions(name, value)):
                continue
            shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            if name == "labels":
                problem = f"it is {shown:.60}, but the program computes no loss"
                raise InputError("argument 'labels'", None, problem, remedy="compute the loss from the logits")
            raise InputError(
                f"argument '{name}'",
                None,
                f"it is {shown:.60}, but the examples had no {name}",
                remedy=f"leave it out, or quantize again with batches that have '{name}'",
            )

    def _check_length(self, ids: Any) -> None:
        """Raise `InputError` for token ids of another length than the only one that a model that generates takes.

        Every step of ``generate`` has one token more.
        """
        lengths = [entry.type.shape[1] for entry in self.signature.inputs if entry.name == "input_ids"]
        is_fixed = bool(lengths) and isinstance(lengths[0], int) and self.can_generate()
        if is_fixed and isinstance(ids, torch.Tensor) and ids.dim() == 2 and ids.shape[1] != lengths[0]:
            raise InputError(
                "input 'input_ids'",
                None,
                f"it has {ids.shape[1]} tokens, but the model takes {lengths[0]}, see model.coverage.notes, and "
                "every step of generate adds one",
                remedy="quantize the model with intaglio.eager, which generates with the cache of the float model",
            )

    def _is_ignorable(self, name: str, value: Any) -> bool:
        """Return whether an argument that the example did not have changes nothing."""
        if isinstance(value, torch.Tensor):
            return name == "attention_mask" and _is_full(value)
        if value is None or name in ("return_dict", STATE_OF_GENERATE) or (name in RESULT_SWITCHES and value is False):
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


def _is_full(mask: torch.Tensor | None) -> bool:
    """Return whether a padding mask has ones only."""
    return mask is None or bool((mask == 1).all())


def _are_default_positions(name: str, value: Any) -> bool:
    """Return whether an argument is the positions 0, 1, 2 ..., which models take if there is none."""
    if name != "position_ids" or not isinstance(value, torch.Tensor) or value.dim() != 2:
        return False
    return bool((value == torch.arange(value.shape[1])).all())


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
        config: configuration of the float model.
        generation_config: its generation configuration.
    """
    quantized.__class__ = quantized_class(QuantizedTransformer, float_class)
    assert isinstance(quantized, QuantizedTransformer)
    quantized.keep_configuration(config, generation_config)
    return quantized
