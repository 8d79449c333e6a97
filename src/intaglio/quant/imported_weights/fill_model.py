"""Give a model the tensors of a checkpoint, and say how the layers with imported weights were meant to run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from intaglio.argument_checks import check_arguments
from intaglio.errors import InputError
from intaglio.quant.imported_weights.quantized_weight import QuantizedWeight
from intaglio.quant.imported_weights.weight_modules import HoldsQuantizedWeight, set_weight
from intaglio.quant.recipes.choices import ActivationMode
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting


@check_arguments
def imported_recipe(model: nn.Module) -> Recipe:
    """Return the recipe that quantizes what the other tool quantized, and nothing else.

    Layers whose activations were meant to be int8 have int8 products where those take their integers; all others
    compute in float32 with their weights as they are.

    Args:
        model: a model of `with_weights`, or with the weights of a checkpoint.

    Returns:
        A recipe with an entry for each layer with int8 products.

    Examples:
        >>> int8 = intaglio.quantize(model, batches, recipe=stages.imported_recipe(model))
    """
    entries = {}
    for path, module in model.named_modules():
        if isinstance(module, HoldsQuantizedWeight):
            mode = module.weight_activations
            if mode != ActivationMode.FLOAT and module.int8_refusal is None:
                entries[path] = Setting(quantize=True, activations=mode)
    return Recipe.of(entries, Setting(quantize=False, activations=ActivationMode.FLOAT))


def fill_model(
    model: nn.Module, weights: Mapping[str, QuantizedWeight], tensors: Mapping[str, torch.Tensor]
) -> tuple[str, ...]:
    """Set the weights and tensors of a model in place, one after the other. Modules that share a parameter share what
    replaces it, unless they have a weight of their own.

    Args:
        model: the model, whose parameters may be on the meta device.
        weights: module path -> quantized weight.
        tensors: name of a parameter or buffer -> float32 values.

    Returns:
        The names of tensors that the model does not have.

    Raises:
        InputError: a weight does not fit the model.
    """
    holders = _holders(model)
    shared = {name: holders[id(parameter)] for name, parameter in _parameters(model).items()}
    for path in weights:
        others = [name.rpartition(".")[0] for name in shared.get(f"{path}.weight", ()) if name.endswith(".weight")]
        paths = [other for other in others if other == path or other not in weights] or [path]
        weight = weights[path]
        for one in paths:
            set_weight(model, one, weight)
    unknown = []
    for name in tensors:
        owner, _, leaf = name.rpartition(".")
        module = _module(model, owner)
        if module is None or leaf not in {
            **dict(module.named_parameters(recurse=False)),
            **dict(module.named_buffers(recurse=False)),
        }:
            if not _add_bias(module, leaf, tensors[name]):
                unknown.append(name)
            continue
        values, own = tensors[name], getattr(module, leaf)
        if own.shape != values.shape:
            problem = f"it has shape {list(values.shape)}, but the model has {list(own.shape)}"
            raise InputError(name, None, problem, remedy="use the checkpoint with the model that it belongs to")
        _set_tensor(model, shared.get(name, (name,)), values)
    return tuple(unknown)


def _add_bias(module: nn.Module | None, leaf: str, values: torch.Tensor) -> bool:
    """Give a layer without a bias one, unless it is 0, as some writers store it; return whether this is a bias."""
    if leaf != "bias" or not isinstance(module, nn.Linear) or tuple(values.shape) != (module.out_features,):
        return False
    if bool(values.any()):
        module.bias = nn.Parameter(values, requires_grad=False)
    return True


def missing_tensors(model: nn.Module) -> tuple[str, ...]:
    """Return the names of parameters and buffers that are still on the meta device."""
    named = (*model.named_parameters(), *model.named_buffers())
    return tuple(name for name, tensor in named if tensor.is_meta)


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _holders(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of every parameter, by its id."""
    found: dict[int, list[str]] = {}
    for name, parameter in _parameters(model).items():
        found.setdefault(id(parameter), []).append(name)
    return found


def _module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _set_tensor(model: nn.Module, names: tuple[str, ...] | list[str], values: torch.Tensor) -> None:
    """Set a parameter, or a buffer, under all its names where it still is one."""
    parameter = nn.Parameter(values, requires_grad=False)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if leaf in dict(module.named_parameters(recurse=False)):
            setattr(module, leaf, parameter)
        elif leaf in dict(module.named_buffers(recurse=False)):
            setattr(module, leaf, values)
