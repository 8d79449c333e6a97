"""`Composed`: several annotators that run in order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from intaglio.argument_checks import check_arguments
from intaglio.errors import UnsupportedError
from intaglio.fxgraph.nodes import operator
from intaglio.quant.annotate.node_annotations import ANNOTATION_KEY, Annotator
from intaglio.quant.annotate.sites import Fixed, Observed, Site


class Composed:
    """Runs annotators in order; raises `UnsupportedError` if one changes or removes an annotation of an earlier one."""

    @check_arguments
    def __init__(self, annotators: Iterable[Annotator]) -> None:
        self.annotators = tuple(annotators)

    @check_arguments
    def annotate(self, module: fx.GraphModule) -> None:
        """Run the annotators in order."""
        annotated: dict[fx.Node, tuple[str, Any, str]] = {}
        for annotator in self.annotators:
            annotator.annotate(module)
            name = type(annotator).__name__
            for node in module.graph.nodes:
                record = node.meta.get(ANNOTATION_KEY)
                if node in annotated and (record is not annotated[node][1] or repr(record) != annotated[node][2]):
                    done = "removed" if record is None else "changed"
                    problem = f"{name} {done} an annotation of {annotated[node][0]}"
                    remedy = "annotate a node only if annotation_of(node) is None"
                    raise UnsupportedError(node.name, operator(node), problem, remedy=remedy)
                if record is not None and node not in annotated:
                    annotated[node] = (name, record, repr(record))

    @check_arguments
    def validate(self, module: fx.GraphModule) -> None:
        """Call ``validate`` of each annotator that defines it."""
        for annotator in self.annotators:
            if hasattr(annotator, "validate"):
                annotator.validate(module)

    @check_arguments
    def specs(self, sites: Sequence[Site]) -> dict[str, Observed | Fixed]:
        """Return the specs of all annotators; for the same site the later one wins."""
        asked = [annotator.specs(sites) for annotator in self.annotators if hasattr(annotator, "specs")]
        return {name: spec for found in asked for name, spec in found.items()}
