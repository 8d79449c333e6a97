"""Groups of operators that get one precision together, the candidates for their precision, and recipes of choices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from intaglio.errors import InputError
from intaglio.fxgraph.node_info import info, origin
from intaglio.quant.annotate.regions import Annotations, Region
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.operator_names import OperatorNames
from intaglio.quant.recipes.choices import ActivationMode, Role
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import Recipe
from intaglio.quant.recipes.settings import Setting

UNCHANGED = "unchanged"
"""Name of the candidate that leaves a group as the recipe says, which is int8 unless it says something else."""
DEFAULT_CANDIDATES: Mapping[str, Setting | None] = {
    "float": None,
    "shortcut16": Setting(shortcut=16),
    "minmax": Setting(method="minmax"),
    "mse": Setting(method="mse"),
    "percentile": Setting(method="percentile:99.99"),
    "token": Setting(activations="token"),
    "two_bytes": Setting(operand_bytes=2, weight_bytes=2),
}
FOUR_BITS: Mapping[str, Setting | None] = {"w4": Setting(weights_dtype="s4", weights="group:32")}
"""Candidate for searches with a size: fewer bits make files smaller, not programs faster."""
ONLY_ADDITIONS = frozenset({"shortcut"})
"""Settings that only kernels with a residual addition read, so that other operators of a module may have them too."""
ONLY_LAYERS = frozenset({"operand_bytes", "weight_bytes"})
"""Settings that only the layer of a kernel reads, and not the operators behind it."""
SAME_PROGRAM = frozenset({"method", "rounding", "bias", "effort"})
"""Settings that change constants of the program, but neither its steps nor its size."""
Assignment = Mapping[str, str]
"""Selector of a group -> name of its candidate, for the groups that are changed."""


@dataclass(frozen=True)
class Candidate:
    """A precision for a group of operators.

    Attributes:
        name: its name.
        setting: entry of the recipe, or ``None`` for the one that changes nothing.
    """

    name: str
    setting: Setting | None = None

    @property
    def in_float(self) -> bool:
        """Return whether it leaves the group in float."""
        return self.setting is not None and self.setting.quantize is False

    @property
    def given(self) -> frozenset[str]:
        """Return the names of the fields that the setting gives."""
        return frozenset(name for name, value in vars(self.setting or Setting()).items() if value is not None)

    @property
    def is_dynamic(self) -> bool:
        """Return whether activations are not calibrated."""
        return self.setting is not None and self.setting.activations not in (None, ActivationMode.STATIC)

    @property
    def changes_program(self) -> bool:
        """Return whether it can change how long the program takes."""
        return not self.given <= SAME_PROGRAM


def candidates_of(given: Mapping[str, Any] | None, with_size: bool) -> tuple[Candidate, ...]:
    """Return the candidates that a user gave, or the default ones.

    Args:
        given: settings by name, in the forms that `Recipe.of` takes.
        with_size: whether the size of the model counts.

    Raises:
        InputError: they are empty, or one has the name of the candidate that changes nothing.
    """
    settings = {**DEFAULT_CANDIDATES, **(FOUR_BITS if with_size else {})} if given is None else given
    entries = Recipe.of(settings).entries
    names = [name for name, _ in entries]
    if not names or UNCHANGED in names:
        problem = "it is empty" if not names else f"{UNCHANGED!r} is the name of what the recipe says"
        raise InputError("candidates", None, problem, remedy="pass settings by name: {'float': None}")
    return tuple(Candidate(name, setting) for name, setting in entries)


@dataclass(frozen=True)
class OperatorGroup:
    """The operators that a selector leaves in float, which get one precision together.

    Attributes:
        selector: selector for recipes.
        nodes: names of the operators in the float graph.
        anchors: names of the first operators of its kernels.
        paths: paths of the modules of its operators.
        alone: whether these modules have only operators of the group, so that a setting for them changes nothing else.
        own_paths: paths of the modules of its layers, if these modules have only operators of the group.
        multiplies: whether PyTorch computes it in float, because it has a convolution, a linear layer or a product.
        layers: whether all its kernels are linear or recurrent layers, whose activations may be quantized dynamically.
        candidates: candidates that change it.
    """

    selector: str
    nodes: frozenset[str]
    anchors: tuple[str, ...]
    paths: frozenset[str]
    alone: bool = True
    own_paths: frozenset[str] = frozenset()
    multiplies: bool = False
    layers: bool = True
    candidates: tuple[Candidate, ...] = field(default=())

    def takes(self, candidate: Candidate) -> bool:
        """Return whether a recipe can give the group a candidate without changing other groups."""
        if candidate.in_float or candidate.given <= ONLY_ADDITIONS:
            return True
        if candidate.given <= ONLY_LAYERS:
            return bool(self.own_paths)
        return self.alone and (self.layers or not candidate.is_dynamic)

    def entries(self, candidate: Candidate) -> list[tuple[str, Setting]]:
        """Return the entries of a recipe that give the group a candidate.

        Operators that run as one kernel need the same setting, except for operators in float.
        """
        if candidate.setting is None:
            return []
        selectors = [self.selector] if candidate.in_float or not self.alone else sorted(self.paths)
        if candidate.given <= ONLY_ADDITIONS:
            selectors = sorted(path for path in self.paths if path) or [self.selector]
        if candidate.given <= ONLY_LAYERS:
            selectors = sorted(self.own_paths)
        return [(selector, candidate.setting) for selector in selectors]

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the names of all candidates, the unchanged one first."""
        return (UNCHANGED, *(one.name for one in self.candidates))


def groups_of(reference: Reference) -> list[OperatorGroup]:
    """Return the groups of a reference in execution order. Kernels that only move data belong to none."""
    selectors, found = OperatorNames(reference).selectors, dict[str, list[Region]]()
    for region in reference.annotations.regions:
        selector = next((selectors[node.name] for node in region.computed if node.name in selectors), None)
        if selector is not None:
            found.setdefault(selector, []).append(region)
    owners: dict[str, set[str]] = {}
    for selector, regions in found.items():
        for region in regions:
            for node in region.computed:
                owners.setdefault(_path(node), set()).add(selector)
    scaled = _scaled_values(reference)
    groups = []
    for selector, regions in found.items():
        if not all(region.is_data_movement for region in regions):
            nodes = [node for region in regions for node in region.computed]
            paths = frozenset(map(_path, nodes))
            names = frozenset(node.name for node in nodes)
            layers = all(region.record.is_linear_layer or region.record.recurrent for region in regions)
            touched = {value.name for node in nodes for value in node.all_input_nodes} | names
            own = {path for path in paths if _owners_below(path, owners) == {selector}}
            alone = not selector.startswith("op:") and own == paths
            anchors = tuple(region.anchor.name for region in regions)
            own_paths = frozenset(_path(region.anchor) for region in regions)
            own_paths = own_paths if own_paths <= own - {""} else frozenset()
            products = any(region.record.accumulates for region in regions)
            dynamic = layers and not touched & scaled
            groups.append(OperatorGroup(selector, names, anchors, paths, alone, own_paths, products, dynamic))
    return groups


def _path(node: fx.Node) -> str:
    """Return the path of an operator's module without the marks of its second and later calls."""
    return ".".join(part.partition("@")[0] for part in origin(node).path.split("."))


def _owners_below(path: str, owners: Mapping[str, set[str]]) -> set[str]:
    """Return the groups of all operators in a module and its submodules."""
    inside = (found for other, found in owners.items() if not path or other == path or other.startswith(f"{path}."))
    return set().union(*inside)


def _scaled_values(reference: Reference) -> set[str]:
    """Return the values that equalization divides by factors, which calibrated readers multiply by."""
    factors = reference.parameters.corrected.equalization.factors
    return {site.value for site in reference.annotations.sites if site.name in factors}


def changed_quantizer(quantizer: Quantizer, entries: Iterable[tuple[str, Setting]]) -> Quantizer:
    """Return the quantizer with more entries in its recipe."""
    recipe = quantizer.recipe
    return replace(quantizer, recipe=replace(recipe, entries=(*recipe.entries, *entries)))


def entries_of(groups: Iterable[OperatorGroup], assignment: Assignment) -> list[tuple[str, Setting]]:
    """Return the entries of a recipe for an assignment."""
    found = []
    for group in groups:
        name = assignment.get(group.selector, UNCHANGED)
        found += [entry for one in group.candidates if one.name == name for entry in group.entries(one)]
    return found


def is_changed(group: OperatorGroup, before: Annotations, after: Annotations) -> bool:
    """Return whether two annotations of a model quantize a group in different ways. Operators that are not quantized
    at all have a candidate of their own."""
    pairs = [(_decisions(before, name), _decisions(after, name)) for name in group.anchors]
    return any(one != other for one, other in pairs) and all(other is not None for _, other in pairs)


def _decisions(annotations: Annotations, anchor: str) -> tuple[object, ...] | None:
    """Return what decides about the arithmetic of the kernels with an anchor or its parts, or ``None`` if they are in
    float."""
    regions = [one for one in annotations.regions if anchor in (one.anchor.name, _layer_name(one.anchor))]
    return tuple(_decision(annotations, region) for region in regions) or None


def _layer_name(node: fx.Node) -> str | None:
    """Return the name of the layer that a node is a part of, if it reads two bytes."""
    part = info(node).part
    return None if part is None else part.layer


def _decision(annotations: Annotations, region: Region) -> tuple[object, ...]:
    by_value = annotations.by_value
    read = dict.fromkeys(value.name for node in region.nodes for value in node.all_input_nodes)
    sites = [by_value.get((name, role)) for name in read for role in Role if role != Role.BIAS]
    kinds = [one and (one.name, one.spec, one.datatype, one.group, one.axis) for one in sites]
    return (region.name, region.dynamic, region.adds_shortcut, *kinds)


def weight_bytes(group: OperatorGroup, annotations: Annotations, datatype_bits: bool = True) -> float:
    """Return the bytes of a group's weights in a saved file.

    Args:
        group: the group.
        annotations: annotations with the precision of the group.
        datatype_bits: whether weights have the bits of their datatype; in float they have 32.
    """
    nodes, total = {node.name: node for node in annotations.module.graph.nodes}, 0.0
    by_value = annotations.by_value
    counted = set[str]()
    for node in nodes.values():
        if not group.nodes & {node.name, _layer_name(node)}:
            continue
        for value in node.all_input_nodes:
            if value.op != "get_attr" or value.name in counted:
                continue
            counted.add(value.name)
            count = getattr(annotations.module, str(value.target)).numel()
            site = by_value.get((value.name, Role.WEIGHT)) if datatype_bits else None
            total += count * (4.0 if site is None else site.record.bits / 8 + (0.5 / site.group if site.group else 0))
    return total
