"""Modules whose weight is quantized: they hold integers and steps, and compute the float weight when it is read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from intaglio.argument_checks import check_arguments_except
from intaglio.errors import InputError
from intaglio.quant.imported_weights.group_operator import dequantize_groups_operator
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight, int8_refusal
from intaglio.tracing.already_quantized import refuse_quantized

QUANTIZED_BUFFER, STEPS_BUFFER = "weight_quantized", "weight_steps"


class HoldsQuantizedWeight(nn.Module):
    """Base class of modules whose ``weight`` is computed from integers and steps. Copies share these tensors, because
    nothing changes them.

    Attributes:
        weight_quantized: int8[N, ...].
        weight_steps: float32[1 or 2, N, G].
        weight_group: number of weights that share a step.
        weight_activations: how activations were meant to be computed; see `QuantizedWeight`.
        weight_columns: int64[K], the column of each input, or ``None`` if they are in order.
    """

    weight_quantized: torch.Tensor
    weight_steps: torch.Tensor
    weight_group: int
    weight_activations: str
    weight_columns: torch.Tensor | None

    @property
    def weight(self) -> torch.Tensor:
        """Return the float32 weight."""
        found: torch.Tensor = dequantize_groups_operator()(self.weight_quantized, self.weight_steps, self.weight_group)
        return found if self.weight_columns is None else found.index_select(1, self.weight_columns)

    @property
    def int8_refusal(self) -> str | None:
        """Return why int8 products cannot take the integers as they are, or ``None`` if they can."""
        return int8_refusal(self.weight_steps)

    def __reduce__(self) -> tuple[Any, ...]:
        kind = next(base for base in type(self).__mro__ if base is not type(self) and base is not HoldsQuantizedWeight)
        return _empty_module, (kind,), vars(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo |= {id(shared): shared for shared in (self.weight_quantized, self.weight_steps)}
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied


def _class_with_quantized_weight(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a class of modules. It has the same name, by which selectors find it."""
    if kind not in CLASSES:
        fields = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        CLASSES[kind] = type(kind.__name__, (HoldsQuantizedWeight, kind), fields)
    return CLASSES[kind]


CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""Classes with a quantized weight, by the class of the float module."""


def _empty_module(kind: type[nn.Module]) -> nn.Module:
    """Return a module of a class with a quantized weight that has no attributes yet."""
    own = _class_with_quantized_weight(kind)
    return own.__new__(own)


@check_arguments_except("model", "weights")  # a check of their values would read those of a checkpoint twice
def with_weights(model: nn.Module, weights: Mapping[str, QuantizedWeight]) -> nn.Module:
    """Return a copy of a model with weights that another tool quantized.

    The copy computes in float32 with the dequantized weights, and shares all other parameters with the model. When it
    is quantized, its weights stay as they are where the recipe allows it; see `QuantizedWeight`.

    Args:
        model: a float32 model.
        weights: module path -> weight, for modules with a parameter ``weight`` such as linear layers.

    Returns:
        The copy, which is called like the model.

    Raises:
        InputError: the model has no such module, or its weight has another shape or type.

    Examples:
        >>> weight = stages.QuantizedWeight.of(integers, scales)
        >>> model = stages.with_weights(float_model, {"encoder.fc1": weight})
        >>> int8 = intaglio.quantize(model, batches)
    """
    refuse_quantized(model)
    if not isinstance(weights, Mapping):
        raise InputError("with_weights", None, f"weights is a {type(weights).__name__}, not a mapping by module path")
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied: nn.Module = copy.deepcopy(model, shared)
    for path in weights:
        set_weight(copied, path, weights[path])
    return copied


def set_weight(model: nn.Module, path: str, weight: QuantizedWeight) -> None:
    """Replace the weight of a module of a model in place by a quantized one; see `with_weights`."""
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    own = None if module is None else dict(module.named_parameters(recurse=False)).get("weight")
    problem = None
    if not isinstance(weight, QuantizedWeight):
        problem = f"its value is a {type(weight).__name__}, not a QuantizedWeight"
    elif module is None:
        problem = "the model has no module with this path"
    elif isinstance(module, HoldsQuantizedWeight):
        problem = "its weight is quantized already"
    elif own is None:
        problem = f"this {type(module).__name__} has no parameter weight"
    elif own.shape != weight.quantized.shape:
        problem = f"its weight has shape {list(own.shape)}, but the quantized one {list(weight.quantized.shape)}"
    elif own.dtype is not torch.float32:
        problem = f"its weight is {own.dtype}; quantized weights are dequantized to float32"
    if problem is not None or module is None:
        remedy = "call model.float() first" if problem is not None and "dequantized to" in problem else None
        raise InputError(path, None, f"{problem}", remedy=remedy)
    del module.weight
    module.register_buffer(QUANTIZED_BUFFER, weight.quantized)
    module.register_buffer(STEPS_BUFFER, weight.steps)
    module.register_buffer("weight_columns", None if weight.order is None else torch.argsort(weight.order))
    vars(module).update(weight_group=weight.group, weight_activations=weight.activations)
    module.__class__ = _class_with_quantized_weight(type(module))
