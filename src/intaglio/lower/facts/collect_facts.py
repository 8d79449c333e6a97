"""Collection of the facts about a reference and the integer graph that it was lowered to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from intaglio.fxgraph.node_info import graph_info, info, origin, tensor_type
from intaglio.fxgraph.nodes import is_constant, name_of, operator
from intaglio.ir import QParams, Ref
from intaglio.lower.facts.operator_facts import IMPORTED, ModelFacts, OperatorFacts, Precision, SiteFacts
from intaglio.quant.annotate.refusals import macs
from intaglio.quant.annotate.regions import Region
from intaglio.quant.annotate.sites import Observed, Site, Skip, spec_text
from intaglio.quant.imported_weights.kept_integers import imported_integers
from intaglio.quant.qdq.convert import Reference
from intaglio.quant.qdq.operator_names import OperatorNames
from intaglio.quant.recipes.choices import Role, Rounding
from intaglio.quant.recipes.quantizer import Quantizer
from intaglio.quant.recipes.recipe import OPEN_RECIPE


@dataclass(frozen=True)
class LoweringResult:
    """Decisions of lowering about the nodes of a reference.

    Attributes:
        integer: names of nodes that are computed on integers.
        native: names of nodes that the program computes in float32.
        skipped: operators that stay in float, with reasons.
        values: value of the integer graph by name of the node.
        computed: values that operators of the final integer graph compute.
    """

    integer: frozenset[str]
    native: frozenset[str]
    skipped: tuple[Skip, ...]
    values: Mapping[str, str]
    computed: frozenset[str]


def facts_of(reference: Reference, lowering: LoweringResult) -> ModelFacts:
    """Return the facts about the operators and sites of a reference."""
    names = OperatorNames(reference)
    shown = [name for name in names.nodes if not names.is_replaced(name)]
    collector = _Collector(reference, names, lowering, frozenset(shown))
    sites = [collector.site(one) for one in reference.annotations.sites if one.role != Role.BIAS]
    return ModelFacts(tuple(map(collector.operator, shown)), {one.name: one for one in sites})


class _Collector:
    """Collects the facts of single operators and sites."""

    def __init__(
        self, reference: Reference, names: OperatorNames, lowering: LoweringResult, shown: frozenset[str]
    ) -> None:
        self.reference, self.names, self.lowering, self.shown = reference, names, lowering, shown
        self.reasons = {skip.node: skip.reason for skip in lowering.skipped}
        self.regions: dict[str, tuple[int, Region]] = {}
        for index, region in enumerate(reference.annotations.regions):
            self.regions.update({node.name: (index, region) for node in region.computed})
        text = reference.model_info.texts.get("quantizer", "")
        self.recipe = Quantizer.from_toml(text).recipe if text else OPEN_RECIPE
        module_types = graph_info(reference.annotations.module).module_types
        self.imported = imported_integers(reference.annotations)
        self.classes = {path: kind.rpartition(".")[2] for path, kind in module_types.items()}

    def operator(self, name: str) -> OperatorFacts:
        """Return the facts about a node of the float graph."""
        node, lowering = self.names.nodes[name], self.lowering
        path, kind, detail = self.names.owner(name)
        index, region = self.regions.get(name, (-1, None))
        site = self.names.sites.get(name)
        mark = info(node).region
        where = origin(node)
        return OperatorFacts(
            node=name,
            path=path,
            operator=kind,
            source=where.source,
            detail=detail,
            folded=self.names.folded(name),
            reads=self._reads(node),
            type=_type_text(node),
            macs=macs(node) if node.op == "call_function" else 0,
            precision=Precision.INPUT if kind == "input" else self._precision(node),
            reason="" if node.name in lowering.integer else self.reasons.get(name, self.reasons.get(node.name, "")),
            fusion=region.name if region is not None else (mark.fusion if mark is not None else ""),
            region=index if region is not None else (mark.index if mark is not None else -1),
            value=self._value(node),
            site=site.name if site is not None else "",
            inputs=self._inputs(region),
            weight=self._weight(name, region),
            selector=self.names.selectors.get(name, ""),
            entries=tuple(one for one, _ in self.recipe.entries_for(where, self.classes)) if where.operator else (),
            dynamic=region is not None and region.dynamic,
        )

    def _precision(self, node: fx.Node) -> Precision:
        if node.name in self.lowering.integer:
            return Precision.INT8
        return Precision.FLOAT32 if node.name in self.lowering.native else Precision.PYTORCH

    def _value(self, node: fx.Node) -> str:
        """Return the value that the integer graph has for a node: itself, or quantized."""
        quantized = [user for user in node.users if operator(user).startswith("quantized_decomposed.quantize")]
        found = (self.lowering.values.get(one.name, "") for one in (node, *quantized))
        return next((value for value in found if value in self.lowering.computed), "")

    def _reads(self, node: fx.Node) -> tuple[str, ...]:
        """Return the shown nodes whose values a node reads, through nodes that are not shown."""
        found: dict[str, None] = {}
        waiting, seen = list(reversed(node.all_input_nodes)), set[fx.Node]()
        while waiting:
            source = waiting.pop()
            if source in seen or is_constant(source) or info(source).dim is not None:
                continue
            seen.add(source)
            if name_of(source) in self.shown:
                found[name_of(source)] = None
            else:
                waiting.extend(reversed(source.all_input_nodes))
        return tuple(found)

    def _inputs(self, region: Region | None) -> tuple[str, ...]:
        """Return the names of the sites of the activations that a region reads."""
        if region is None:
            return ()
        by_value = self.reference.annotations.by_value
        roles = (region.x_role, Role.SHORTCUT, Role.ACTIVATION)
        sites = [
            next((by_value[value.name, role] for role in roles if (value.name, role) in by_value), None)
            for value in region.activations()
        ]
        return tuple(dict.fromkeys(site.name for site in sites if site is not None))

    def _weight(self, name: str, region: Region | None) -> str:
        """Return the name of the site of the weight of a region's anchor, or ""."""
        if region is None or region.anchor.name != name:
            return ""
        by_value = self.reference.annotations.by_value
        sites = (by_value.get((value.name, Role.WEIGHT)) for value in region.anchor.all_input_nodes)
        return next((site.name for site in sites if site is not None), "")

    def site(self, site: Site) -> SiteFacts:
        """Return the facts about a site."""
        reference, leader = self.reference, self.reference.annotations.leaders.get(site.name, site.name)
        q, seen = reference.qparams.get(site.name), reference.observed.get(leader)
        scales, zeros = _constants(q)
        leading = next((one for one in reference.annotations.sites if one.name == leader), site)
        is_weight = site.role == Role.WEIGHT
        return SiteFacts(
            name=site.name,
            node=site.value,
            role=site.role.value,
            datatype=site.datatype or str(site.dtype),
            qmin=site.qmin if q is None else q.qmin,
            qmax=site.qmax if q is None else q.qmax,
            scales=len(scales),
            scale=_extremes(scales),
            zero_point=zeros[0] if len(set(zeros)) == 1 else None,
            spec=spec_text(site.spec),
            method=leading.spec.method if isinstance(leading.spec, Observed) else "",
            leader=leader,
            count=seen.count if seen is not None else 0,
            low=seen.low if seen is not None and math.isfinite(seen.low) else 0.0,
            high=seen.high if seen is not None and math.isfinite(seen.high) else 0.0,
            factors=_extremes(reference.parameters.corrected.equalization.factors.get(site.name, ())),
            rounding=self._rounding(site) if is_weight else "",
        )

    def _rounding(self, site: Site) -> str:
        """Return the method that rounded a weight."""
        kept = self.imported.get(site.name)
        if kept is not None and self.reference.qparams.get(site.name) == kept.qparams:
            return IMPORTED
        if site.name not in self.reference.parameters.corrected.quantized_weights:
            return Rounding.NEAREST.value
        found = (
            region.setting.rounding
            for region in self.reference.annotations.regions
            if any(value.name == site.value for value in region.anchor.all_input_nodes)
        )
        return str(next((method for method in found if method is not None), Rounding.NEAREST))


def _constants(q: QParams | None) -> tuple[Sequence[float], Sequence[int]]:
    """Return scales and zero points that are known before the model runs."""
    return ((), ()) if q is None or isinstance(q.scale, Ref) else (q.scales, q.zeros)


def _extremes(values: Iterable[float]) -> tuple[float, ...]:
    """Return the smallest and the largest value, or nothing."""
    found = tuple(values)
    return (float(min(found)), float(max(found))) if found else ()


def _type_text(node: fx.Node) -> str:
    """Return element type and shape of a value."""
    kind = tensor_type(node)
    return f"{kind.dtype}[{', '.join(map(str, kind.shape))}]" if kind is not None else operator(node)
