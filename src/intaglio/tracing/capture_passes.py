"""`CAPTURE_PASSES`: what `capture` does to the graph that torch.export gives."""

from __future__ import annotations

from intaglio.fxgraph.graph_passes import Pass
from intaglio.fxgraph.passes.attention_masks import resolve_masks
from intaglio.fxgraph.passes.half_precision import widen_halves
from intaglio.fxgraph.passes.identities import drop_checks, drop_identity, free_views

CAPTURE_PASSES: tuple[Pass, ...] = (
    drop_checks,  # first: each would count as a reader of the value that it looks at
    free_views,  # before copies go: a view may then read a tensor that is not contiguous
    widen_halves,  # before identities: a cast from half to float32 becomes one
    drop_identity,
    resolve_masks,  # last: it follows masks to their origin, and copies would stand in its way
)
"""For every mode. Constants are not folded here: while a model is trained its weights change."""
