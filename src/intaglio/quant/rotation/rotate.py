"""`rotate`: multiply residual streams and the values of attention by rotations that are folded into weights.

Large channels, which most language models have in the residual stream, are spread over all channels, so that weights
and activations are easier to round (QuaRot, Ashkboos et al. 2024; the rotations R1 and R2 of SpinQuant, Liu et al.
2024). The float model computes the same function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx

from intaglio.errors import CalibrationError
from intaglio.fxgraph.graph_passes import copy_graph
from intaglio.fxgraph.node_info import constant_path, info, known_type, origin
from intaglio.fxgraph.nodes import layer_operands
from intaglio.ir import DType
from intaglio.quant.annotate.find_sites import ValueNames
from intaglio.quant.calibrate.prepare import Prepared
from intaglio.quant.correct.corrections import Equalization
from intaglio.quant.precision.apply_decisions import reannotated
from intaglio.quant.rotation.fold_rotation import fold_rotation
from intaglio.quant.rotation.online_rotation import chosen_places, with_online_rotations
from intaglio.quant.rotation.rotated_values import RotatedValues, find_rotated_values

NOTHING_ROTATED = "rotate: nothing, because the model has no attention and no residual stream that norms read"
"""The line of the report for models without a value that weights could rotate."""


def rotate(prepared: Prepared) -> tuple[Prepared, Equalization, list[str]]:
    """Return the model with the rotations that its recipe asks for, these rotations, and the lines of the report."""
    rotations, lines = choose_rotations(prepared)
    names = ValueNames(prepared.annotations.module.graph)
    turned = [one for one in find_rotated_values(prepared.annotations) if names.of(one.first) in rotations]
    readers = {layer.name for one in turned for layer in one.readers}
    rotated = with_rotations(prepared, rotations)
    places = chosen_places(rotated, readers)
    online = {name: place.size for name, place in places.items()}
    attentions = sum(place.attention is not None for place in places.values())
    if places and not rotations:
        lines = [line for line in lines if line != NOTHING_ROTATED]
    if len(places) > attentions:
        lines = [*lines, f"rotate: operands of other layers, {len(places) - attentions} values at run time"]
    if attentions:
        lines.append(f"rotate: queries and keys of {attentions} attentions at run time")
    return with_online_rotations(rotated, online), Equalization(rotations=rotations, hadamards=online), lines


def choose_rotations(prepared: Prepared) -> tuple[dict[str, int], list[str]]:
    """Return the rotations that a recipe asks for, by ``rotate = true`` for all of their layers.

    Returns:
        Name of the first value -> size of the rotation, as `with_rotations` takes them; and the lines of the report.
    """
    recipe = prepared.quantizer.recipe
    if not any(setting.rotate for setting in (recipe.default, *(setting for _, setting in recipe.entries))):
        return {}, []
    module = prepared.annotations.module
    chosen, left = list[RotatedValues](), list[tuple[RotatedValues, str]]()
    every = find_rotated_values(prepared.annotations)
    if not every:
        return {}, [NOTHING_ROTATED]
    for found in every:
        others = [one for one in found.layers if not recipe.setting(origin(one), prepared.classes).rotate]
        if found.layers and len(others) == len(found.layers):
            continue
        if (reason := found.refusal or _refusal(found, others)) is None:
            chosen.append(found)
        else:
            left.append((found, reason))
    names = ValueNames(module.graph)
    return {names.of(found.first): found.size for found in chosen}, _report(chosen, left)


def with_rotations(prepared: Prepared, rotations: Mapping[str, int]) -> Prepared:
    """Return the model with some values rotated, which computes the same function.

    Args:
        prepared: the prepared model, without other decisions by data.
        rotations: name of the first of the values -> size of the rotation.

    Raises:
        CalibrationError: the model does not have these values.
    """
    if not rotations:
        return prepared
    module = copy_graph(prepared.annotations.module)
    names = ValueNames(module.graph)
    every = find_rotated_values(replace(prepared.annotations, module=module))
    found = {(names.of(one.first), one.size): one for one in every if one.refusal is None}
    if unknown := sorted(name for name, size in rotations.items() if (name, size) not in found):
        problem = f"the model has no values that can be rotated at {', '.join(unknown[:5])}"
        remedy = "use it with the model and the recipe that it was made for"
        raise CalibrationError("equalization", None, problem, remedy=remedy)
    for key in rotations.items():
        fold_rotation(module, found[key])
    return reannotated(prepared, module)


def _refusal(found: RotatedValues, others: Sequence[fx.Node]) -> str | None:
    """Return why constants cannot be rotated; ``others`` are the layers without ``rotate = true``."""
    if others:
        return f"{_path(others[0])} does not have rotate = true, and all of their layers must have it"
    weights = [layer_operands(layer).weight for layer in found.layers]
    for constant in (*weights, *(constant for _, constant in found.constants)):
        name = constant_path(constant, str(constant.target))
        if info(constant).imported is not None:
            return f"another tool quantized {name}"
        if known_type(constant).dtype is not DType.F32:
            return f"{name} is not float32"
    return None


def _report(chosen: Sequence[RotatedValues], left: Sequence[tuple[RotatedValues, str]]) -> list[str]:
    """Return a line for each residual stream, and one for all attentions with the same outcome."""
    found = [(one, f", {one.size} channels, {len(one.layers)} linear layers") for one in chosen if one.is_stream]
    found += [(one, f", {one.size} channels in each head") for one in chosen if not one.is_stream]
    found += [(one, f" left unchanged, because {reason}") for one, reason in left]
    lines = [f"rotate: residual stream{outcome}" for one, outcome in found if one.is_stream]
    attentions = Counter(outcome for one, outcome in found if not one.is_stream)
    lines += [f"rotate: values of {count} attentions{outcome}" for outcome, count in attentions.items()]
    return lines


def _path(layer: fx.Node) -> str:
    return origin(layer).path or layer.name
