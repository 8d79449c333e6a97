"""The passes that `capture` runs on the graph from torch.export."""

from __future__ import annotations

from intaglio.fxgraph.graph_passes import Pass
from intaglio.fxgraph.passes.attention_masks import simplify_attention_masks
from intaglio.fxgraph.passes.canonicalize_matmul import conv_tbc_to_convolution, vector_weight_to_matrix
from intaglio.fxgraph.passes.element_types.half_precision import upcast_half_precision
from intaglio.fxgraph.passes.identities import (
    drop_assertions,
    drop_empty_parts,
    drop_identity,
    view_to_reshape,
)
from intaglio.tracing.strided_views import refuse_strides

CAPTURE_PASSES: tuple[Pass, ...] = (
    drop_assertions,  # first: each assertion would count as a reader of its value
    view_to_reshape,  # before copies are removed: without them a view may read a tensor that is not contiguous
    conv_tbc_to_convolution,  # likewise: conv_tbc takes contiguous tensors only
    vector_weight_to_matrix,
    upcast_half_precision,  # before `drop_identity`: casts from half to float32 become identities
    drop_empty_parts,  # before `drop_identity`: a concatenation of one part is an identity
    drop_identity,
    refuse_strides,
    simplify_attention_masks,  # last: its patterns do not match across copies
)
"""Passes for inference and training. Constants are not folded here, because weights change in training."""
